import { workerState } from "../../components/states";
import type { WorkerRow } from "../../store/state";

export const HEAT_BY = ["state", "heartbeat", "step", "slowness"] as const;
export type HeatBy = (typeof HEAT_BY)[number];

export const HEAT_TITLES: Record<HeatBy, string> = {
  state: "State",
  heartbeat: "Heartbeat age",
  step: "Step",
  slowness: "Slowness",
};

export interface Palette {
  good: string;
  warn: string;
  bad: string;
  accent: string;
  quiet: string;
  low: string;
}

export function readPalette(element: Element): Palette {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim() || "#888888";
  return {
    good: read("--good-fill"),
    warn: read("--warn-fill"),
    bad: read("--bad-fill"),
    accent: read("--accent"),
    quiet: read("--quiet-fill"),
    low: read("--heat-0"),
  };
}

const RAMP_STEPS = 100;
const ramps = new Map<string, string[]>();

/** Between two #rrggbb colours, in hundredths: ten thousand cells are mixed once a second. */
export function mix(from: string, to: string, share: number): string {
  const key = from + to;
  let ramp = ramps.get(key);
  if (!ramp) {
    ramp = Array.from({ length: RAMP_STEPS + 1 }, (_, step) => blend(from, to, step / RAMP_STEPS));
    ramps.set(key, ramp);
  }
  return ramp[Math.round(Math.max(0, Math.min(1, share)) * RAMP_STEPS)] ?? to;
}

function blend(from: string, to: string, s: number): string {
  const channel = (colour: string, index: number) => Number.parseInt(colour.slice(1 + 2 * index, 3 + 2 * index), 16);
  const mixed = [0, 1, 2].map((index) => Math.round(channel(from, index) * (1 - s) + channel(to, index) * s));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

export interface HeatScale {
  lowestStep: number;
  highestStep: number;
  timeoutMs: number;
  now: number;
}

/** The colour of a worker's cell. Only what a state means is green, amber or red; amounts go from grey to blue. */
export function heatColour(worker: WorkerRow, by: HeatBy, palette: Palette, scale: HeatScale): string {
  if (worker.membership === "dead") return palette.bad;
  if (worker.membership === "left") return palette.quiet;
  switch (by) {
    case "state": {
      const { tone } = workerState(worker);
      // Who is not heard stands out; those who wait for it, and those who train, step back.
      if ((scale.now - worker.heard_at_ms) * 2 >= scale.timeoutMs) return mix(palette.warn, palette.bad, 0.6);
      if (tone === "warn") return mix(palette.low, palette.warn, 0.5);
      return tone === "good" ? mix(palette.low, palette.good, 0.62) : palette[tone];
    }
    case "heartbeat": {
      const share = (scale.now - worker.heard_at_ms) / scale.timeoutMs;
      return share < 0.5
        ? mix(palette.low, palette.accent, share * 1.2)
        : mix(palette.warn, palette.bad, (share - 0.5) * 2);
    }
    case "step": {
      if (worker.step === null) return palette.quiet;
      const span = scale.highestStep - scale.lowestStep;
      return mix(palette.low, palette.accent, span === 0 ? 1 : (worker.step - scale.lowestStep) / span);
    }
    case "slowness":
      if (worker.slowness === null) return palette.quiet;
      if (worker.is_straggler) return mix(palette.warn, palette.bad, worker.slowness - 1.5);
      return mix(palette.low, palette.accent, (worker.slowness - 0.9) / 0.4);
  }
}

export function stepRange(workers: WorkerRow[]): { lowestStep: number; highestStep: number } {
  let lowestStep = Number.POSITIVE_INFINITY;
  let highestStep = Number.NEGATIVE_INFINITY;
  for (const { step, membership } of workers) {
    if (step === null || membership !== "live") continue;
    lowestStep = Math.min(lowestStep, step);
    highestStep = Math.max(highestStep, step);
  }
  return Number.isFinite(lowestStep) ? { lowestStep, highestStep } : { lowestStep: 0, highestStep: 0 };
}
