import { type ClockZone, clock, dateTime } from "../format/time";

/** Round values that cover a range, at most about `wanted` of them, and no closer than `least`: 1 for things counted. */
export function niceTicks(low: number, high: number, wanted: number, least = 0): number[] {
  if (!(high > low)) return [low];
  const raw = Math.max(least, (high - low) / Math.max(1, wanted));
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = raw / power;
  const step = (unit <= 1 ? 1 : unit <= 2 ? 2 : unit <= 2.5 ? 2.5 : unit <= 5 ? 5 : 10) * power;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

/** The end of an axis that starts at 0: the first round value at or above `high`. */
export function niceMax(high: number, wanted = 4, least = 0): number {
  if (!(high > 0)) return 1;
  const ticks = niceTicks(0, high, wanted, least);
  const step = (ticks[1] ?? high) - (ticks[0] ?? 0);
  const last = ticks.at(-1) ?? high;
  return last >= high - 1e-12 ? last : last + step;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

/** Full minutes and hours between two times (seconds), so that axes read like a clock. */
export function timeTicks(from: number, to: number, wanted: number): number[] {
  const step = TIME_STEPS.find((candidate) => (to - from) / candidate <= wanted) ?? 86_400;
  const ticks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}

/** What to write at time ticks: seconds where they matter, the day where hours do not. */
export function timeLabels(ticks: number[], zone: ClockZone): string[] {
  const step = (ticks[1] ?? 60) - (ticks[0] ?? 0);
  const days = (ticks.at(-1) ?? 0) - (ticks[0] ?? 0) >= 86_400;
  return ticks.map((at) => {
    if (days) return dateTime(at, zone).slice(5, step < 86_400 ? 16 : 10);
    return clock(at, zone).slice(0, step < 60 ? 8 : 5);
  });
}

/** A value at an axis: as elsewhere, without zeros after the point. */
export function tickText(text: string): string {
  return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

export type Scale = (value: number) => number;

export function linear(from: number, to: number, start: number, end: number): Scale {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

type Apart = (index: number) => boolean;
const TOGETHER: Apart = () => false;

/** Stretches `[first, last]` of known values; one ends where a value is unknown, or is `apart` from the one before. */
function stretches(ys: (number | null)[], apart: Apart): [number, number][] {
  const found: [number, number][] = [];
  let first: number | null = null;
  ys.forEach((y, index) => {
    if (first !== null && (y === null || apart(index))) {
      found.push([first, index - 1]);
      first = null;
    }
    if (y !== null) first ??= index;
  });
  if (first !== null) found.push([first, ys.length - 1]);
  return found;
}

function through(xs: number[], ys: (number | null)[], first: number, last: number): string {
  let path = "";
  for (let index = first; index <= last; index += 1) {
    path += `${index === first ? "M" : "L"}${(xs[index] ?? 0).toFixed(1)},${(ys[index] ?? 0).toFixed(1)}`;
  }
  return path;
}

/** An SVG path through the points; unknown values leave gaps, and one by itself is a dot. */
export function linePath(xs: number[], ys: (number | null)[], apart: Apart = TOGETHER): string {
  return stretches(ys, apart)
    .map(([first, last]) => through(xs, ys, first, last) + (first === last ? "h0" : ""))
    .join("");
}

/** The line, closed along the baseline, piece by piece between gaps. */
export function areaPath(xs: number[], ys: (number | null)[], baseline: number, apart: Apart = TOGETHER): string {
  return stretches(ys, apart)
    .map(([first, last]) => {
      const back = `L${(xs[last] ?? 0).toFixed(1)},${baseline}L${(xs[first] ?? 0).toFixed(1)},${baseline}Z`;
      return through(xs, ys, first, last) + back;
    })
    .join("");
}

/** The index of the value nearest to `wanted` in an ascending list. */
export function nearestIndex(sorted: number[], wanted: number): number {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((sorted[middle] ?? 0) < wanted) low = middle + 1;
    else high = middle;
  }
  const before = sorted[low - 1];
  return before !== undefined && wanted - before < (sorted[low] ?? 0) - wanted ? low - 1 : low;
}
