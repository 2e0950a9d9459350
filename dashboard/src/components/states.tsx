import type { LogLevel, TaskState } from "../api/types";
import type { WorkerRow } from "../store/state";

export type Tone = "good" | "warn" | "bad" | "accent" | "quiet";

const WORKER_TONES: Record<string, Tone> = {
  training: "good",
  checkpointing: "accent",
  loading: "accent",
  waiting: "warn",
  recovering: "warn",
  idle: "quiet",
  finished: "quiet",
};

/** What a worker is doing; that it is dead or has left outweighs what it last said. */
export function workerState(worker: Pick<WorkerRow, "membership" | "state">): { text: string; tone: Tone } {
  if (worker.membership === "dead") return { text: "dead", tone: "bad" };
  if (worker.membership === "left") return { text: "left", tone: "quiet" };
  return { text: worker.state || "live", tone: WORKER_TONES[worker.state] ?? "quiet" };
}

export function Badge({ tone, children }: { tone: Tone; children: string }) {
  return (
    <span className={`badge ${tone}`}>
      <i className={`dot ${tone === "accent" ? "accent" : tone}`} />
      {children}
    </span>
  );
}

export function WorkerBadge({ worker }: { worker: WorkerRow }) {
  const { text, tone } = workerState(worker);
  return <Badge tone={tone}>{text}</Badge>;
}

const TASK_TONES: Record<TaskState, Tone> = {
  running: "good",
  recovering: "warn",
  waiting: "warn",
  finished: "quiet",
  stopped: "quiet",
  idle: "quiet",
};

export function TaskBadge({ state }: { state: TaskState }) {
  return <Badge tone={TASK_TONES[state]}>{state}</Badge>;
}

export const LEVEL_TONES: Record<LogLevel, Tone> = { info: "quiet", warning: "warn", error: "bad" };

/** A small bar with its figure: how much of something is used. */
export function Meter({ fraction, text, warnAt = 1.01 }: { fraction: number | null; text: string; warnAt?: number }) {
  if (fraction === null) return <span className="muted">—</span>;
  const share = Math.max(0, Math.min(1, fraction));
  return (
    <span className="meter">
      <span className="meter-text num">{text}</span>
      <span className="meter-track">
        <i className={share >= warnAt ? "warn" : ""} style={{ width: `${share * 100}%` }} />
      </span>
    </span>
  );
}

export function ProgressBar({
  fraction,
  tone = "accent",
  label,
}: {
  fraction: number | null;
  tone?: string;
  label: string;
}) {
  const percent = fraction === null ? undefined : Math.round(fraction * 1000) / 10;
  return (
    <div
      className={`progress ${tone}`}
      role="progressbar"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={percent}
    >
      <i style={{ width: `${percent ?? 0}%` }} />
    </div>
  );
}
