// The rows of the timeline: of each lane the planned one above the measured one, with what is in them in order of time.

import * as format from "./format.js";

// A row is {lane, kind, items, waits, exposed}; an item {start, stop, task}, where `task` is one of the plan's.
export function rowsOf(lanes, plan, round) {
  const planned = plan.tasks.map((task) => ({ start: task.start_us, stop: task.stop_us, task }));
  const measured = round?.spans.map(([, start, stop, at]) => ({ start, stop, task: plan.tasks[at] })) ?? [];
  const kinds = [["planned", planned, plan], ["measured", measured, round]].filter(([, items]) => items.length);
  return lanes.flatMap((lane) =>
    kinds.map(([kind, items, source]) => ({
      lane,
      kind,
      items: items.filter((item) => item.task.lane === lane).sort((one, other) => one.start - other.start),
      waits: lane === "target" ? source.waits : [],
      exposed: lane === "draft" ? source.exposed : [],
    })),
  );
}

// Where in a list, which is in order and does not overlap itself, the first item is that stops after a time.
export function firstAfter(items, us) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].stop > us) high = middle;
    else low = middle + 1;
  }
  return low;
}

// What is at a time, or no further from it than `near`: an item, else a wait.
export function found(row, us, near) {
  const at = firstAfter(row.items, us - near);
  const item = [row.items[at], row.items[at + 1]].find((each) => each && each.start <= us && us <= each.stop);
  if (item) return { item };
  const wait = row.waits.find((each) => each.start_us <= us && us <= each.stop_us);
  if (wait) return { wait };
  return row.items[at]?.start <= us + near ? { item: row.items[at] } : null;
}

// Lines of text about an item or a wait of a row.
export function described(row, { item, wait }) {
  if (wait) {
    const why = wait.for_draft ? "the target waits for the draft" : "the target waits";
    return [`bubble, ${row.kind}: ${why}`, wait.text, span(wait.start_us, wait.stop_us)];
  }
  const { task } = item;
  const places = ["layer", "group", "slot"].filter((name) => task[name] >= 0).map((name) => `${name} ${task[name]}`);
  if (task.step >= 0) places.push(`draft step ${task.step}`);
  const lines = [`${task.name} (${task.kind}), ${row.kind}`, places.join(", "), span(item.start, item.stop)];
  if (task.bytes) {
    const speed = item.stop > item.start ? `, ${format.rate(task.bytes / (item.stop - item.start))}` : "";
    lines.push(`${format.bytes(task.bytes)} over the link${speed}`);
  }
  if (task.memory_bytes) lines.push(`${format.bytes(task.memory_bytes)} of device memory read`);
  if (row.kind === "measured") lines.push(`planned ${span(task.start_us, task.stop_us)}`);
  if (task.cause) {
    const earlier = task.earlier ? " of the round before" : "";
    const waited = task.idle_us > 0 ? `, after ${format.time(task.idle_us)} of standing still` : "";
    lines.push(`planned to start right after ${task.cause}${earlier} (${task.why})${waited}`);
  }
  const exposed = row.exposed.some(([start, stop]) => start < item.stop && item.start < stop);
  if (exposed) lines.push("exposed: the target waits for it");
  return lines.filter(Boolean);
}

const span = (start, stop) => `${format.time(start)} to ${format.time(stop)}: ${format.time(stop - start)}`;
