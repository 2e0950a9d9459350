export const MISSING = "—";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12,480 */
export function count(value: number | null | undefined): string {
  return value === null || value === undefined || !Number.isFinite(value) ? MISSING : whole.format(value);
}

/** Three significant figures, for rates and latencies: 3.42, 34.2, 342, 3,420 */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(1);
  if (size >= 100) return whole.format(value);
  if (size < 1) return String(Number(value.toPrecision(3)));
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** 12.5K, 3.4M: for tiles and axes, where room is short. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size < 10_000) return figure(value);
  const [divisor, suffix] = size < 1e6 ? [1e3, "K"] : size < 1e9 ? [1e6, "M"] : size < 1e12 ? [1e9, "G"] : [1e12, "T"];
  const scaled = value / (divisor as number);
  return `${Math.abs(scaled) >= 100 ? scaled.toFixed(0) : trimZeros(scaled.toFixed(1))}${suffix}`;
}

function trimZeros(text: string): string {
  return text.replace(/\.0+$/, "");
}

/** 0.973 → 97.3% */
export function percent(fraction: number | null | undefined, digits = 1): string {
  if (fraction === null || fraction === undefined || !Number.isFinite(fraction)) return MISSING;
  // 99.97% must not read as complete.
  const text = (fraction * 100).toFixed(digits);
  if (fraction < 1 && Number(text) >= 100) return `${(100 - 10 ** -digits).toFixed(digits)}%`;
  return `${trimZeros(text)}%`;
}

export type ByteUnits = "binary" | "decimal";

/** How many bytes the unit has in which `value` is written. */
export function byteUnit(value: number, units: ByteUnits): number {
  const step = units === "binary" ? 1024 : 1000;
  let unit = 1;
  while (Math.abs(value) / unit >= step && unit < step ** 5) unit *= step;
  return unit;
}

/** 8.00 GiB or 8.59 GB */
export function bytes(value: number | null | undefined, units: ByteUnits = "binary"): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const names = units === "binary" ? ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] : ["B", "KB", "MB", "GB", "TB", "PB"];
  const unit = byteUnit(value, units);
  const index = Math.round(Math.log(unit) / Math.log(units === "binary" ? 1024 : 1000));
  const scaled = value / unit;
  const text = index === 0 ? whole.format(scaled) : scaled.toFixed(scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2);
  return `${text} ${names[index]}`;
}

/** 1 worker, 2 workers */
export function plural(value: number, noun: string, nouns = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}
