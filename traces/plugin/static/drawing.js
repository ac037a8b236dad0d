// Draws the rows of a timeline on a canvas.

import { firstAfter } from "./lanes.js";
import { EXPOSED, color, colorsOf, hatching } from "./theme.js";

export const AXIS = 22; // pixels above the rows

// `rows` are laid out: each has its `top` and `height`; `view` is the part of the round to draw, in us.
export class Drawing {
  constructor(canvas, { rows, ends, view, height, selected }) {
    Object.assign(this, { canvas, rows, ends, view, height, selected });
    this.context = canvas.getContext("2d");
    this.width = canvas.clientWidth; // asked for once: each time the browser lays out the page
  }

  x(us) {
    return ((us - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  draw() {
    const { canvas, context } = this;
    if (!this.rows.length || !this.width) return;
    const ratio = window.devicePixelRatio;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    context.scale(ratio, ratio);
    context.font = "11px Roboto, sans-serif";
    context.textBaseline = "middle";
    this.drawAxis();
    const bubble = hatching(context, color("bubble"), true);
    const exposed = hatching(context, EXPOSED, false);
    for (const row of this.rows) {
      context.fillStyle = color("row");
      context.fillRect(0, row.top, this.width, row.height);
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
}
