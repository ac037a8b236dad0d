// The timeline of one round: which part of it is on the screen, and what is selected.

import { AXIS, Drawing } from "./drawing.js";
import * as format from "./format.js";
import { listen } from "./gestures.js";
import { described, firstAfter, found, rowsOf } from "./lanes.js";

const ROW = { planned: 18, measured: 24 };
const GAP = { planned: 2, measured: 10 };
const NEAR = 3; // pixels
const LEAST_US = 0.05; // of time that can fill the width

export class Timeline {
  // `labels`, `canvas`, `range` and `details` are elements; `tip` one that follows the pointer.
  constructor(parts) {
    Object.assign(this, parts);
    this.rows = [];
    this.ends = []; // of the round, planned and measured
    this.view = [0, 1];
    this.whole = [0, 1];
    this.selected = null; // {row, item or wait}
    listen(this);
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

  us(x) {
    return this.view[0] + (x / this.canvas.clientWidth) * (this.view[1] - this.view[0]);
  }

  draw() {
    new Drawing(this.canvas, this).draw();
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
}
