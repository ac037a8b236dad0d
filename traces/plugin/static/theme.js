// Colours that the colour-blind can tell apart (Okabe and Ito's), and TensorBoard's dark mode.

const LANES = {
  target: { fill: "#0072B2", text: "#ffffff" },
  link: { fill: "#E69F00", text: "#000000" },
  store: { fill: "#009E73", text: "#000000" },
  draft: { fill: "#CC79A7", text: "#000000" },
};
const OTHER_LANE = { fill: "#56B4E9", text: "#000000" };

export const EXPOSED = "#D55E00";
export const FIRST_RUN = "#0072B2";
export const SECOND_RUN = "#E69F00";

export const colorsOf = (lane) => LANES[lane] ?? OTHER_LANE;

// A colour of style.css, which has them for light and for dark.
export const color = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();

// Follows the switch in TensorBoard's header or, on a page of its own, the system's setting.
export function followTheme(changed) {
  const outer = window.parent === window ? null : window.parent.document.body;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.body.classList.toggle("dark", outer ? outer.classList.contains("dark-mode") : system.matches);
    changed();
  };
  if (outer) new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
  else system.addEventListener("change", apply);
  apply();
}

// Stripes, so that a meaning is not told by colour alone.
export function hatching(context, stroke, rising) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const lines = tile.getContext("2d");
  lines.strokeStyle = stroke;
  lines.lineWidth = 1.5;
  for (const shift of [-8, 0, 8]) {
    lines.moveTo(shift, rising ? 8 : 0);
    lines.lineTo(shift + 8, rising ? 0 : 8);
  }
  lines.stroke();
  return context.createPattern(tile, "repeat");
}
