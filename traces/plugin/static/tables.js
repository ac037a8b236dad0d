// The tables: figures of a round and of a run, alone or beside another's, layers, requests, memory.

import * as format from "./format.js";

// Name, field, how it is written, what it means. All values come from specstream.traces.figures.
const ROUND = [
  ["round time", "duration_us", format.time, "planned: from one round to the next"],
  ["link floor", "link_floor_us", format.time, "what the streamed bytes take on the link alone"],
  ["round time / link floor", "over_link_floor", format.times, "1 is the best a streamed round can do"],
  ["link utilization", "link_utilization", format.share, "streamed bytes / (round time x the link's bandwidth)"],
  ["bubbles", "bubbles_us", format.time, "how long the target's lane stands still"],
  ["bubble fill", "bubble_fill", format.share, "hidden draft time / the bubbles' time"],
  ["draft", "draft_us", format.time, "all draft steps"],
  ["hidden draft", "hidden_draft_us", format.time, "draft time that the round is no longer for"],
  [
    "exposed draft",
    "exposed_draft_us",
    format.time,
    "planned: how much shorter the round would be without; measured: while the target waits for the draft",
  ],
  ["streamed", "streamed_bytes", format.bytes, "history attended to from the host"],
];
const RUN = [
  ["rounds", "num_rounds", format.count, "that are kept"],
  ["decode rounds", "num_decode_rounds", format.count, "without a part of a prompt"],
  ["tokens/s", "tokens_per_second", format.decimal, "output tokens a second of decode rounds"],
  ["median decode round", "median_round_us", format.time, ""],
  ["slowest decode round", "slowest_round_us", format.time, ""],
  ["link floor", "link_floor_us", format.time, "of a decode round, on average"],
  ["time / link floor", "over_link_floor", format.times, "of decode rounds"],
  ["link utilization", "link_utilization", format.share, "of decode rounds"],
  ["mean acceptance length", "mean_acceptance_length", format.decimal, "the target's own token included"],
  ["draft acceptance rate", "draft_acceptance_rate", format.share, "accepted / drafted"],
  ["acceptance per position", "acceptance_per_position", format.shares, "share of verifications that accepted it"],
  ["generated tokens", "generated_tokens", format.count, ""],
  ["streamed", "streamed_bytes", format.bytes, "in all rounds"],
  ["streamed a decode round", "streamed_bytes_per_round", format.bytes, "on average"],
  ["fetched", "link_bytes", format.bytes, "what was fetched ahead and dropped included"],
];

function cell(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  return element;
}

function fill(table, heads, rows) {
  const head = document.createElement("tr");
  head.append(...heads.map((text) => cell("th", text, { scope: "col" })));
  const body = rows.map(({ name, title, values, field }) => {
    const row = document.createElement("tr");
    if (field) row.dataset.field = field;
    row.append(cell("th", name, { scope: "row", title }), ...values.map((value) => cell("td", value)));
    return row;
  });
  table.tHead?.remove();
  table.createTHead().append(head);
  table.querySelector("tbody")?.remove();
  table.createTBody().append(...body);
}

// Figures of several sources side by side; if `compared`, the last column says how the last two differ that are there.
function fillFigures(table, figures, columns, compared) {
  const [one, two] = columns.every(([, source]) => source) ? columns.slice(-2) : columns.slice(0, 2);
  const rows = figures.map(([name, field, write, title]) => {
    const values = columns.map(([, source]) => source?.[field]);
    const difference = compared ? [format.difference(one[1][field], two[1][field])] : [];
    return { name, title, field, values: [...values.map(write), ...difference] };
  });
  fill(table, ["", ...columns.map(([head]) => head), ...(compared ? ["difference"] : [])], rows);
}

// `shown` is {run, index, plan, round}; `other` the same of a second run, or null.
export function fillRound(table, shown, other) {
  const all = [shown, ...(other ? [other] : [])];
  const label = (each, kind) => (other ? `${each.run.name}: ${kind}` : kind);
  const columns = [
    ...all.map((each) => [label(each, "planned"), each.plan.figures]),
    ...all.map((each) => [label(each, each.round ? `round ${each.index}` : "not measured"), each.round?.figures]),
  ];
  fillFigures(table, ROUND, columns, Boolean(other));
}

export function fillRun(table, shown, other) {
  const columns = [shown, ...(other ? [other] : [])].map((each) => [other ? each.run.name : "", each.run.figures]);
  fillFigures(table, RUN, columns, Boolean(other));
}

export function fillBusy(table, { plan, round }) {
  const rows = Object.entries(plan.figures.busy_us).map(([lane, us]) => {
    const { busy_us: measured, duration_us: duration } = round?.figures ?? {};
    const part = (busy, whole) =>
      typeof busy === "number" ? `${format.time(busy)}, ${format.share(busy / whole)}` : format.NONE;
    return { name: lane, title: "", values: [part(us, plan.figures.duration_us), part(measured?.[lane], duration)] };
  });
  fill(table, ["lane", "busy, planned", "busy, measured"], rows);
}

export function fillLayers(table, { plan, round }) {
  const measured = new Map((round?.layers ?? []).map((layer) => [layer.layer, layer]));
  const columns = [
    ["target", "target_us", format.time],
    ["link", "link_us", format.time],
    ["over the link", "bytes_per_us", format.rate],
    ["target waits", "waited_us", format.time],
  ];
  const rows = plan.layers.map((layer) => {
    const both = [layer, measured.get(layer.layer)];
    const values = columns.flatMap(([, field, write]) => both.map((each) => write(each?.[field])));
    const name = layer.layer < 0 ? "none" : String(layer.layer);
    return { name, title: "", values: [format.bytes(layer.link_bytes), ...values] };
  });
  const heads = columns.flatMap(([name]) => [`${name}, planned`, "measured"]);
  fill(table, ["layer", "streamed", ...heads], rows);
}

export function fillRequests(table, { round }) {
  const rows = (round?.requests ?? []).map((request) => ({
    name: String(request.request_id),
    title: "",
    values: [
      ...["prompt_tokens", "candidates", "accepted", "produced"].map((name) => format.count(request[name])),
      request.foreseen === null ? format.NONE : request.foreseen ? "yes" : "no",
    ],
  }));
  fill(table, ["request", "of its prompt", "candidates", "accepted", "produced", "foreseen"], rows);
}

export function fillMemory(table, shown, other) {
  const all = [shown, ...(other ? [other] : [])].map((each) => each.run);
  const classes = [...new Set(all.flatMap((run) => Object.keys(run.info.memory)))];
  const sizes = (name) => all.map((run) => format.bytes(run.info.memory[name]));
  const rows = classes.map((name) => ({ name, title: "", values: sizes(name) }));
  fill(table, ["class", ...all.map((run) => (other ? run.name : "bytes"))], rows);
}

export function fillInfo(table, shown, other) {
  const all = [shown, ...(other ? [other] : [])].map((each) => each.run.info);
  const pairs = (value) => Object.entries(value).map(([key, each]) => `${key} ${each}`);
  const text = (value) => (value instanceof Object ? pairs(value).join(", ") : String(value ?? format.NONE));
  const rows = ["started", "kind", "target", "draft", "machine", "versions", "options"].map((name) => ({
    name,
    title: "",
    values: all.map((info) => text(info[name])),
  }));
  fill(table, ["", ...all.map((info) => info.name)], rows);
}
