// The timeline of one round on a canvas: drawing, zooming, panning, pointing.

import * as format from "./format.js";
import { described, firstAfter, found, rowsOf } from "./lanes.js";
import { EXPOSED, color, colorsOf, hatching } from "./theme.js";

const AXIS = 22;
const ROW = { planned: 18, measured: 24 };
const GAP = { planned: 2, measured: 10 };
const NEAR = 3; // pixels
const LEAST_US = 0.05; // of time that can fill the width

export class Timeline {
  // `labels`, `canvas`, `range` and `details` are elements; `tip` one that follows the pointer.
  constructor(parts) {
    Object.assign(this, parts);
    this.context = this.canvas.getContext("2d");
    this.rows = [];
    this.width = 0;
    this.view = [0, 1];
    this.whole = [0, 1];
    this.selected = null; // {row, item or wait}
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  // Shows a round; the part of it that is on the screen stays if `keepView`.
  show(lanes, plan, round, keepView) {
    this.rows = rowsOf(lanes, plan, round);
    this.ends = [
      ["planned", plan.figures.duration_us],
      ["measured", round?.figures.duration_us],
    ].filter(([, us]) => us !== undefined);
    const items = this.rows.flatMap((row) => row.items);
    const stops = [...items.map((item) => item.stop), ...this.ends.map(([, us]) => us)];
    const first = items.reduce((least, item) => Math.min(least, item.start), 0);
    const last = stops.reduce((most, us) => Math.max(most, us), LEAST_US);
    this.whole = [first, last + (last - first) / 100];
    this.selected = null;
    this.details.textContent = "";
    this.tip.hidden = true;
    this.layOut();
    if (keepView) this.look(...this.view);
    else this.look(...this.whole);
  }

  layOut() {
    let top = AXIS;
    this.labels.replaceChildren();
    for (const row of this.rows) {
      row.top = top;
      row.height = ROW[row.kind];
      top += row.height + GAP[row.kind];
      const label = document.createElement("div");
      label.textContent = `${row.lane} ${row.kind}`;
      label.style.top = `${row.top}px`;
      label.style.lineHeight = `${row.height}px`;
      this.labels.append(label);
    }
    this.height = top;
    this.labels.style.height = this.canvas.style.height = `${top}px`;
  }

  // Looks at a part of the round, in us, moved and cut to what there is.
  look(start, stop) {
    const [first, last] = this.whole;
    const width = Math.min(last - first, Math.max(LEAST_US, stop - start));
    const from = Math.min(Math.max(first, start), last - width);
    this.view = [from, from + width];
    this.range.textContent = `showing ${format.time(from)} to ${format.time(from + width)}`;
    this.draw();
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const [start, stop] = this.view;
    this.look(at - (at - start) * factor, at + (stop - at) * factor);
  }

  pan(share) {
    const by = share * (this.view[1] - this.view[0]);
    this.look(this.view[0] + by, this.view[1] + by);
  }

  fit() {
    this.look(...this.whole);
  }

  x(us) {
    return ((us - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  us(x) {
    return this.view[0] + (x / this.width) * (this.view[1] - this.view[0]);
  }

  draw() {
    const { canvas, context, height } = this;
    const width = (this.width = canvas.clientWidth); // asked for once: each time the browser lays out the page
    if (!this.rows.length || !width) return;
    const ratio = window.devicePixelRatio;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    context.font = "11px Roboto, sans-serif";
    context.textBaseline = "middle";
    this.drawAxis();
    const bubble = hatching(context, color("bubble"), true);
    const exposed = hatching(context, EXPOSED, false);
    for (const row of this.rows) {
      context.fillStyle = color("row");
      context.fillRect(0, row.top, width, row.height);
      this.drawWaits(row, bubble);
      this.drawItems(row);
      this.drawExposed(row, exposed);
      this.drawNames(row);
    }
    this.drawEnds();
    this.drawSelected();
  }

  drawAxis() {
    const { context } = this;
    const rough = (this.view[1] - this.view[0]) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    const [size, unit] = this.view[1] < 1e3 ? [1, "us"] : [1e3, "ms"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
    for (let us = Math.ceil(this.view[0] / step) * step; us <= this.view[1]; us += step) {
      const x = Math.round(this.x(us)) + 0.5;
      context.fillStyle = color("line");
      context.fillRect(x, AXIS - 4, 1, this.height);
      context.fillStyle = color("faint");
      context.fillText(`${(us / size).toFixed(digits)} ${unit}`, x + 3, AXIS / 2);
    }
  }

  // Calls `paint` with the left and right edge of each item in view. Those narrower than a pixel share one.
  inView(items, paint) {
    let painted = -1;
    for (let at = firstAfter(items, this.view[0]); at < items.length && items[at].start < this.view[1]; at++) {
      const left = this.x(items[at].start);
      const right = Math.max(left + 1, this.x(items[at].stop));
      if (right - left <= 1 && Math.floor(left) === painted) continue;
      painted = Math.floor(left);
      paint(Math.max(-2, left), Math.min(this.width + 2, right), items[at]);
    }
  }

  drawItems(row) {
    const { context } = this;
    const colors = colorsOf(row.lane);
    this.inView(row.items, (left, right, { task }) => {
      const width = right - left;
      // layers by turns lighter and darker
      context.globalAlpha = (row.kind === "planned" ? 0.65 : 1) - (task.layer % 2 === 0 ? 0 : 0.15);
      context.fillStyle = colors.fill;
      context.fillRect(left, row.top, width > 3 ? width - 0.5 : width, row.height);
      context.globalAlpha = 1;
    });
  }

  drawNames(row) {
    const ink = row.kind === "planned" ? color("ink") : colorsOf(row.lane).text;
    this.inView(row.items, (left, right, { task }) => this.write(task.name, left, right, row, ink));
  }

  // Writes as much of a text as there is room for; on `ground`, a colour, if what lies behind it is busy.
  write(text, left, right, row, ink, ground = null) {
    const { context } = this;
    const start = Math.max(left, 0) + 4;
    const room = Math.floor((right - start - 4) / 6); // characters, about
    if (room < 3) return;
    const fitting = text.length <= room ? text : `${text.slice(0, room - 1)}…`;
    if (ground) {
      context.fillStyle = ground;
      context.fillRect(start - 2, row.top + 2, context.measureText(fitting).width + 4, row.height - 4);
    }
    context.fillStyle = ink;
    context.fillText(fitting, start, row.top + row.height / 2);
  }

  drawWaits(row, hatched) {
    const waits = row.waits.map((wait) => ({ start: wait.start_us, stop: wait.stop_us }));
    const [ink, ground] = [color("ink"), color("row")];
    this.inView(waits, (left, right) => {
      this.context.fillStyle = hatched;
      this.context.fillRect(left, row.top, right - left, row.height);
      this.write("waits", left, right, row, ink, ground);
    });
  }

  drawExposed(row, hatched) {
    const { context } = this;
    const times = row.exposed.map(([start, stop]) => ({ start, stop }));
    this.inView(times, (left, right) => {
      context.fillStyle = hatched;
      context.fillRect(left, row.top, right - left, row.height);
      context.strokeStyle = EXPOSED;
      context.lineWidth = 2;
      context.strokeRect(left + 1, row.top + 1, Math.max(1, right - left - 2), row.height - 2);
    });
  }

  drawEnds() {
    const { context } = this;
    context.strokeStyle = color("ink");
    context.lineWidth = 1;
    for (const [kind, us] of this.ends) {
      context.setLineDash(kind === "planned" ? [4, 3] : []);
      context.beginPath();
      context.moveTo(this.x(us), AXIS - 6);
      context.lineTo(this.x(us), this.height);
      context.stroke();
    }
    context.setLineDash([]);
  }

  drawSelected() {
    if (!this.selected) return;
    const { row, item, wait } = this.selected;
    const [start, stop] = item ? [item.start, item.stop] : [wait.start_us, wait.stop_us];
    this.context.strokeStyle = color("ink");
    this.context.lineWidth = 2;
    const left = this.x(start);
    this.context.strokeRect(left, row.top, Math.max(2, this.x(stop) - left), row.height);
  }

  select(row, what) {
    const same = ["item", "wait"].every((kind) => this.selected?.[kind] === what?.[kind]);
    if (same && this.selected?.row === (what ? row : undefined)) return;
    this.selected = what && { row, ...what };
    this.details.textContent = what ? described(row, what).join("; ") : "";
    this.draw();
  }

  // Selects the task that is `by` further on its row, or the row's first in view, and brings it into view.
  step(by) {
    const row = this.selected?.row ?? this.rows.find((each) => each.items.length);
    if (!row) return;
    const { item: now } = this.selected ?? {};
    const from = now ? row.items.indexOf(now) + by : firstAfter(row.items, this.view[0]);
    const item = row.items[Math.min(row.items.length - 1, Math.max(0, from))];
    if (!item) return;
    const middle = (item.start + item.stop) / 2;
    const [start, stop] = this.view;
    if (middle < start || middle > stop) this.pan((middle - (start + stop) / 2) / (stop - start));
    this.select(row, { item });
  }

  // Selects what is on the row above or below at the same time, or next to it.
  stepRow(by) {
    const rows = this.rows.filter((row) => row.items.length);
    const now = rows.indexOf(this.selected?.row);
    const row = rows[Math.min(rows.length - 1, Math.max(0, now + by))];
    if (!row) return;
    const us = this.selected?.item?.start ?? this.view[0];
    this.select(row, { item: row.items[Math.min(row.items.length - 1, firstAfter(row.items, us))] });
  }

  point(event) {
    const { offsetX, offsetY } = event;
    const row = this.rows.find((each) => each.top <= offsetY && offsetY < each.top + each.height);
    const near = this.us(NEAR) - this.us(0);
    const what = row && found(row, this.us(offsetX), near);
    this.select(row, what);
    this.tip.hidden = !what;
    if (!what) return;
    this.tip.textContent = described(row, what).join("\n");
    const room = document.documentElement.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, room))}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }

  listen() {
    const { canvas } = this;
    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (dragged = null));
    canvas.addEventListener("pointermove", (event) => {
      if (dragged === null) return this.point(event);
      this.pan((dragged - event.offsetX) / this.width);
      dragged = event.offsetX;
    });
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  // The wheel scrolls the page, unless the timeline has the focus or Ctrl is held: then it zooms, sideways it pans.
  turn(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
    else this.zoom(Math.exp(event.deltaY / 300), this.us(event.offsetX));
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => this.zoom(1 / 1.5),
      "=": () => this.zoom(1 / 1.5),
      w: () => this.zoom(1 / 1.5),
      "-": () => this.zoom(1.5),
      s: () => this.zoom(1.5),
      a: () => this.pan(-0.2),
      d: () => this.pan(0.2),
      0: () => this.fit(),
      n: () => this.step(1),
      p: () => this.step(-1),
      ArrowUp: () => this.stepRow(-1),
      ArrowDown: () => this.stepRow(1),
      Escape: () => {
        this.tip.hidden = true;
        this.select(null, null);
      },
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
