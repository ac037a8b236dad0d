// Numbers for people. What is not known is a dash.

export const NONE = "–";

const orNone = (format) => (value) => (value === null || value === undefined ? NONE : format(value));

export const time = orNone((us) => {
  if (Math.abs(us) < 1e3) return `${us.toFixed(1)} us`;
  return Math.abs(us) < 1e6 ? `${(us / 1e3).toFixed(2)} ms` : `${(us / 1e6).toFixed(2)} s`;
});

export const bytes = orNone((size) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${size.toFixed(0)} B` : `${size.toFixed(2)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(2)} TiB`;
});

export const share = orNone((value) => `${(100 * value).toFixed(1)}%`);
export const times = orNone((value) => `${value.toFixed(2)} x`);
export const rate = orNone((bytesPerUs) => `${(bytesPerUs / 1e3).toFixed(1)} GB/s`);
export const count = orNone((value) => String(value));
export const decimal = orNone((value) => value.toFixed(2));
export const shares = orNone((values) => values.map((value) => value.toFixed(2)).join(", ") || NONE);

// How much larger `other` is than `value`.
export function difference(value, other) {
  if (typeof value !== "number" || typeof other !== "number" || value === 0) return "";
  const percent = 100 * (other / value - 1);
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(1)}%`;
}
