import { MISSING } from "./numbers";

/** 850 ms, 3.2 s, 47 s, 4 min 12 s, 3 h 5 min, 2 d 4 h */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return MISSING;
  const value = Math.max(0, seconds);
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${Number((value * 1000).toFixed(value < 0.01 ? 1 : 0))} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 59.5) return `${Math.round(value)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86_400) return pair(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  return pair(Math.floor(whole / 86_400), "d", Math.floor((whole % 86_400) / 3600), "h");
}

function pair(large: number, largeUnit: string, small: number, smallUnit: string): string {
  return small === 0 ? `${large} ${largeUnit}` : `${large} ${largeUnit} ${small} ${smallUnit}`;
}

/** The age of something, for people: "just now", "12 s ago". */
export function ago(at: number, now: number): string {
  const age = now - at;
  if (age < 1.5) return "just now";
  // From ten minutes on, seconds only make it harder to read.
  return `${duration(age < 600 ? Math.floor(age) : Math.floor(age / 60) * 60)} ago`;
}

/** Heartbeat ages tick in tenths below ten seconds. */
export function heartbeatAge(seconds: number): string {
  const value = Math.max(0, seconds);
  return value < 9.95 ? `${value.toFixed(1)} s` : duration(Math.floor(value));
}

export function milliseconds(value: number | null | undefined): string {
  if (value === 0) return "0 ms";
  return value === null || value === undefined ? MISSING : duration(value / 1000);
}

export type ClockZone = "local" | "utc";

function parts(at: number, zone: ClockZone): [number, number, number, number, number, number] {
  const date = new Date(at * 1000);
  return zone === "utc"
    ? [
        date.getUTCFullYear(),
        date.getUTCMonth() + 1,
        date.getUTCDate(),
        date.getUTCHours(),
        date.getUTCMinutes(),
        date.getUTCSeconds(),
      ]
    : [date.getFullYear(), date.getMonth() + 1, date.getDate(), date.getHours(), date.getMinutes(), date.getSeconds()];
}

const two = (value: number) => String(value).padStart(2, "0");

/** 14:03:27 */
export function clock(at: number, zone: ClockZone = "local"): string {
  const [, , , hours, minutes, seconds] = parts(at, zone);
  return `${two(hours)}:${two(minutes)}:${two(seconds)}`;
}

/** 2026-11-15 14:03:27 */
export function dateTime(at: number, zone: ClockZone = "local"): string {
  const [year, month, day] = parts(at, zone);
  return `${year}-${two(month)}-${two(day)} ${clock(at, zone)}`;
}
