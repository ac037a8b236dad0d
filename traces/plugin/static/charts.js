// The smaller charts, drawn by uPlot: all rounds' times, and the acceptance of each candidate position.

import uPlot from "./uplot/uPlot.esm.js";
import { FIRST_RUN, SECOND_RUN, color } from "./theme.js";

const axis = (label) => ({
  label,
  stroke: color("ink"),
  grid: { stroke: color("line"), width: 0.5 },
  ticks: { stroke: color("line") },
  font: "11px Roboto, sans-serif",
  labelFont: "11px Roboto, sans-serif",
  labelSize: 18,
  size: label === "" ? 30 : 52,
});

// Times of all rounds, and what the link alone would take; a click on one opens it, dragging zooms.
export function drawOverview(element, run, selected, open) {
  element.replaceChildren();
  if (!run.rounds.length) return null;
  const indices = run.rounds.map((round) => round.index);
  const milliseconds = (wanted) => run.rounds.map((round, at) => (wanted(round) ? round.duration_us / 1e3 : null));
  const dots = { show: true, size: 4 };
  const chart = new uPlot(
    {
      width: element.clientWidth,
      height: 150,
      scales: { x: { time: false }, y: { distr: 3 } },
      axes: [axis(""), axis("ms (log)")],
      series: [
        { label: "round" },
        { label: "decoding", stroke: FIRST_RUN, width: 1, points: dots },
        { label: "with prompts", stroke: SECOND_RUN, width: 1, paths: () => null, points: { show: true, size: 7 } },
        { label: "link alone", stroke: color("ink"), dash: [4, 3], width: 1, points: { show: false } },
      ],
      cursor: { y: false, drag: { x: true, y: false } },
      hooks: { draw: [(drawn) => markSelected(drawn, selected())] },
    },
    [
      indices,
      milliseconds((round) => !round.prompt_tokens),
      milliseconds((round) => round.prompt_tokens),
      run.link_floors_us.map((us) => (us === null ? null : us / 1e3)),
    ],
    element,
  );
  chart.over.addEventListener("click", () => {
    if (chart.cursor.idx !== null && chart.cursor.idx !== undefined) open(indices[chart.cursor.idx]);
  });
  return chart;
}

function markSelected(chart, index) {
  if (index === null) return;
  const { ctx, bbox } = chart;
  const x = Math.round(chart.valToPos(index, "x", true));
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.fillStyle = color("ink");
  ctx.fillRect(x - 1, bbox.top, 3, bbox.height);
}

// For each candidate position, the share of verifications that accepted it; beside it that of another run, or null.
export function drawAcceptance(element, run, other) {
  element.replaceChildren();
  const [first, second] = [run, other].map((each) => each?.figures.acceptance_per_position);
  const positions = Math.max(first.length, second?.length ?? 0);
  if (!positions) {
    element.textContent = "Nothing was drafted.";
    return;
  }
  const numbers = Array.from({ length: positions }, (_, at) => at + 1);
  const padded = (values) => numbers.map((number) => values[number - 1] ?? null);
  const bars = (align) => uPlot.paths.bars({ size: [second ? 0.35 : 0.6, 60], align });
  const series = [
    { label: "position" },
    { label: run.name, stroke: color("ink"), fill: FIRST_RUN, paths: bars(other ? -1 : 0), points: { show: false } },
  ];
  const data = [numbers, padded(first)];
  if (second) {
    series.push({ label: other.name, stroke: color("ink"), fill: SECOND_RUN, paths: bars(1), points: { show: false } });
    data.push(padded(second));
  }
  new uPlot(
    {
      width: Math.min(420, element.clientWidth),
      height: 200,
      scales: { x: { time: false, range: [0.4, positions + 0.6] }, y: { range: [0, 1] } },
      axes: [{ ...axis(""), splits: () => numbers }, axis("share accepted")],
      series,
      cursor: { y: false, drag: { x: false, y: false } },
    },
    data,
    element,
  );
}
