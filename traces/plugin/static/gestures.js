// What the pointer, the wheel and the keys do in the timeline.

export const ZOOM = 1.5; // of a key or a button

export function listen(timeline) {
  const { canvas } = timeline;
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (dragged = null));
  canvas.addEventListener("pointermove", (event) => {
    if (dragged === null) return timeline.point(event);
    timeline.tip.hidden = true;
    timeline.pan((dragged - event.offsetX) / canvas.clientWidth);
    dragged = event.offsetX;
  });
  canvas.addEventListener("pointerleave", () => (timeline.tip.hidden = true));
  canvas.addEventListener("dblclick", () => timeline.fit());
  canvas.addEventListener("wheel", (event) => turn(timeline, event), { passive: false });
  canvas.addEventListener("keydown", (event) => press(timeline, event));
}

// The wheel scrolls the page, unless the timeline has the focus or Ctrl is held: then it zooms, sideways it pans.
function turn(timeline, event) {
  if (!event.ctrlKey && document.activeElement !== timeline.canvas) return;
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(event.deltaX / timeline.canvas.clientWidth);
  else timeline.zoom(Math.exp(event.deltaY / 300), timeline.us(event.offsetX));
}

function press(timeline, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    "+": () => timeline.zoom(1 / ZOOM),
    "=": () => timeline.zoom(1 / ZOOM),
    w: () => timeline.zoom(1 / ZOOM),
    "-": () => timeline.zoom(ZOOM),
    s: () => timeline.zoom(ZOOM),
    a: () => timeline.pan(-0.2),
    d: () => timeline.pan(0.2),
    0: () => timeline.fit(),
    n: () => timeline.step(1),
    p: () => timeline.step(-1),
    ArrowUp: () => timeline.stepRow(-1),
    ArrowDown: () => timeline.stepRow(1),
    Escape: () => {
      timeline.tip.hidden = true;
      timeline.select(null, null);
    },
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
