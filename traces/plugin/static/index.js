// The page: which run and round are shown, and what follows when another is chosen.

import { drawAcceptance, drawOverview } from "./charts.js";
import { fetchPlan, fetchRound, fetchRun, fetchRuns } from "./data.js";
import { ZOOM } from "./gestures.js";
import { PAGE } from "./page.js";
import * as tables from "./tables.js";
import { followTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

// What TensorBoard calls once the page's frame is there.
export async function render() {
  await Promise.all(["./uplot/uPlot.min.css", "./style.css"].map(styled));
  document.documentElement.lang = "en";
  document.body.innerHTML = PAGE;
  const page = new Page();
  followTheme(() => page.draw());
  await page.reload();
}

function styled(name) {
  return new Promise((resolve, reject) => {
    const link = document.createElement("link");
    Object.assign(link, { rel: "stylesheet", href: new URL(name, import.meta.url), onload: resolve, onerror: reject });
    document.head.append(link);
  });
}

class Page {
  constructor() {
    this.parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
    const { labels, canvas, range, details, tip } = this.parts;
    this.timeline = new Timeline({ labels, canvas, range, details, tip });
    this.shown = null; // {run, index, plan, round}: `round` is null of a run that is only planned
    this.other = null; // the same of the run to compare with
    this.asked = { shown: 0, other: 0 };
    this.listen();
  }

  listen() {
    const { run, round, compare, compareRound, before, after, reload, zoomIn, zoomOut, fit } = this.parts;
    run.addEventListener("change", () => this.openRun(run.value));
    round.addEventListener("change", () => this.openRound(Number(round.value)));
    compare.addEventListener("change", () => this.compareWith(compare.value));
    compareRound.addEventListener("change", () => this.compareWith(compare.value, Number(compareRound.value)));
    before.addEventListener("click", () => this.step(-1));
    after.addEventListener("click", () => this.step(1));
    reload.addEventListener("click", () => this.reload());
    zoomIn.addEventListener("click", () => this.timeline.zoom(1 / ZOOM));
    zoomOut.addEventListener("click", () => this.timeline.zoom(ZOOM));
    fit.addEventListener("click", () => this.timeline.fit());
    document.addEventListener("keydown", (event) => {
      if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.step(by);
    });
    let width = document.body.clientWidth;
    new ResizeObserver(() => {
      if (width === document.body.clientWidth) return;
      width = document.body.clientWidth;
      this.drawCharts();
    }).observe(document.body);
  }

  // Calls `use` with what `load` gives, unless something else was asked for in its place meanwhile.
  async show(place, load, use) {
    const asked = ++this.asked[place];
    this.parts.status.textContent = "reading …";
    try {
      const loaded = await load();
      if (asked !== this.asked[place]) return;
      this.parts.status.textContent = "";
      use(loaded);
    } catch (error) {
      if (asked !== this.asked[place]) return;
      this.parts.status.textContent = error.message;
      this.parts.round.value = this.shown?.index ?? "";
    }
  }

  async reload() {
    await this.show("shown", fetchRuns, (runs) => {
      const { run, compare, status } = this.parts;
      const kept = runs.includes(run.value) ? run.value : runs[0];
      run.replaceChildren(...runs.map((name) => new Option(name, name)));
      compare.replaceChildren(new Option("nothing", ""), ...runs.map((name) => new Option(name, name)));
      compare.value = this.other?.run.name ?? "";
      if (kept === undefined) {
        status.textContent = "No traced runs in TensorBoard's --logdir.";
        return;
      }
      run.value = kept;
      this.openRun(kept, this.shown?.run.name === kept ? this.shown.index : null);
    });
  }

  // Shows a run: the round of that index, or else its typical one.
  openRun(name, index = null) {
    return this.show(
      "shown",
      () => opened(name, index),
      (shown) => {
        this.shown = shown;
        this.parts.content.hidden = false;
        this.draw();
      },
    );
  }

  openRound(index) {
    const { run } = this.shown;
    return this.show(
      "shown",
      () => openedRound(run, index),
      (shown) => {
        const keepView = this.shown.plan.id === shown.plan.id;
        this.shown = shown;
        this.drawRound(keepView);
      },
    );
  }

  // Goes that many rounds on, from the one that was asked for last.
  step(by) {
    const { rounds } = this.shown?.run ?? { rounds: [] };
    const at = rounds.findIndex((round) => round.index === Number(this.parts.round.value));
    const next = rounds[at + by];
    if (!next) return;
    this.parts.round.value = next.index;
    this.openRound(next.index);
  }

  compareWith(name, index = null) {
    const use = (other) => {
      this.other = other;
      this.drawCharts();
      this.drawTables();
    };
    return name ? this.show("other", () => opened(name, index), use) : use(null);
  }

  draw() {
    if (!this.shown) return;
    this.drawRound(false);
    this.drawCharts();
  }

  drawRound(keepView) {
    const { run, index, plan, round } = this.shown;
    this.parts.round.value = index ?? "";
    const { rounds } = run;
    this.parts.of.textContent = rounds.length ? `of ${rounds[0].index} to ${rounds.at(-1).index}` : "only planned";
    this.timeline.show(run.info.lanes, plan, round, keepView);
    this.overview?.redraw();
    this.drawTables();
  }

  drawCharts() {
    if (!this.shown) return;
    const { overview, acceptance } = this.parts;
    const selected = () => this.shown.index;
    this.overview = drawOverview(overview, this.shown.run, selected, (index) => this.openRound(index));
    drawAcceptance(acceptance, this.shown.run, this.other?.run ?? null);
  }

  drawTables() {
    const { shown, other, parts } = this;
    tables.fillRound(parts.roundFigures, shown, other);
    tables.fillRun(parts.runFigures, shown, other);
    tables.fillBusy(parts.busy, shown);
    tables.fillLayers(parts.layers, shown);
    tables.fillRequests(parts.requests, shown);
    tables.fillMemory(parts.memory, shown, other);
    tables.fillInfo(parts.info, shown, other);
    parts.plan.textContent = shown.plan.text;
    parts.why.textContent = shown.plan.why_exposed ? `Exposed draft: ${shown.plan.why_exposed}.` : "";
    parts.compareRound.value = other?.index ?? "";
    parts.compareRound.disabled = !other;
  }
}

async function opened(name, index) {
  const run = await fetchRun(name);
  const kept = run.rounds.some((round) => round.index === index);
  const chosen = kept ? index : run.figures.typical_round;
  if (chosen !== null) return openedRound(run, chosen);
  if (!run.num_plans) throw new Error(`nothing of ${name} is recorded yet`);
  return { run, index: null, plan: await fetchPlan(name, 0), round: null };
}

async function openedRound(run, index) {
  const round = await fetchRound(run.name, index);
  return { run, index, plan: round.plan, round };
}
