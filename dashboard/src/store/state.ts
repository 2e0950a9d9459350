import type {
  Action,
  Barriers,
  Checkpoint,
  Coordinator,
  Dataset,
  History,
  Job,
  LogEntry,
  Metrics,
  Task,
  Worker,
} from "../api/types";

/** A worker with the moment it was last heard, on this browser's clock (ms), so that its age can tick. */
export interface WorkerRow extends Worker {
  heard_at_ms: number;
}

/** What is known of one job. */
export interface JobState {
  job: string;
  coordinator: Coordinator;
  jobs: Job[];
  workers: ReadonlyMap<string, WorkerRow>;
  datasets: Dataset[];
  checkpoints: Checkpoint[];
  barriers: Barriers;
  /** When `barriers` was received, so that open ones can tick. */
  barriers_at_ms: number;
  metrics: Metrics;
  tasks: Task[];
  actions: Action[];
  logs: LogEntry[];
}

export type Link =
  | { status: "connecting" }
  | { status: "connected"; via: "stream" | "polling"; since: number }
  | { status: "disconnected"; message: string; retryAt: number; attempt: number; since: number };

export interface State {
  link: Link;
  data: JobState | null;
  history: History | null;
  /** The browser's clock (ms) when data last came. */
  receivedAt: number | null;
  /** Coordinator clock minus browser clock, ms. */
  clockOffset: number;
}

export const INITIAL_STATE: State = {
  link: { status: "connecting" },
  data: null,
  history: null,
  receivedAt: null,
  clockOffset: 0,
};

export const LOGS_KEPT = 2_000;
export const CHECKPOINTS_KEPT = 500;
export const POINTS_KEPT = 3_600;
