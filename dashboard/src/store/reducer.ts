import type { SourceEvent } from "../api/backend";
import type { Change, Checkpoint, Dashboard, History, HistoryPoint, LogEntry, Metrics, Worker } from "../api/types";
import {
  CHECKPOINTS_KEPT,
  INITIAL_STATE,
  type JobState,
  LOGS_KEPT,
  POINTS_KEPT,
  type State,
  type WorkerRow,
} from "./state";

export type StoreEvent = SourceEvent | { kind: "history"; history: History } | { kind: "reset" };

/** The next state; `now` is the browser's clock in ms. */
export function reduce(state: State, event: StoreEvent, now: number): State {
  switch (event.kind) {
    case "snapshot":
      return applySnapshot(state, event.dashboard, now);
    case "change":
      return applyChange(state, event.change, now);
    case "history":
      return { ...state, history: event.history };
    case "connected":
      return { ...state, link: { status: "connected", via: event.via, since: now } };
    case "connecting":
      // The banner stays up until data flows: no flicker at each attempt.
      return state.link.status === "disconnected" ? state : { ...state, link: { status: "connecting" } };
    case "disconnected": {
      const since = state.link.status === "disconnected" ? state.link.since : now;
      const { message, retryAt, attempt } = event;
      return { ...state, link: { status: "disconnected", message, retryAt, attempt, since } };
    }
    case "reset":
      return INITIAL_STATE;
  }
}

function applySnapshot(state: State, dashboard: Dashboard, now: number): State {
  const { event_id: _, workers, logs, checkpoints, ...rest } = dashboard;
  const data: JobState = {
    ...rest,
    workers: new Map(workers.map((worker) => [worker.worker_id, toRow(worker, now)])),
    logs: mergeLogs([], logs),
    checkpoints: mergeCheckpoints([], checkpoints),
    barriers_at_ms: now,
  };
  const sameJob = state.data?.job === data.job;
  const next = {
    ...state,
    data,
    history: sameJob ? state.history : null,
    receivedAt: now,
    clockOffset: dashboard.coordinator.now * 1000 - now,
  };
  return sameJob ? appendHistory(next, now) : next;
}

function applyChange(state: State, change: Change, now: number): State {
  if (!state.data) return state;
  if (change.job !== state.data.job) return state;
  const {
    workers,
    removed_workers,
    logs,
    checkpoints,
    removed_checkpoints,
    barriers,
    event_id: _,
    ...replaced
  } = change;
  const data: JobState = { ...state.data, ...replaced };
  if (workers?.length || removed_workers?.length) {
    data.workers = mergeWorkers(state.data.workers, workers ?? [], removed_workers ?? [], now);
  }
  if (logs?.length) data.logs = mergeLogs(state.data.logs, logs);
  if (checkpoints?.length || removed_checkpoints?.length) {
    const dropped = new Set(removed_checkpoints);
    const kept = state.data.checkpoints.filter((checkpoint) => !dropped.has(checkpoint.checkpoint_id));
    data.checkpoints = mergeCheckpoints(kept, checkpoints ?? []);
  }
  if (barriers) {
    data.barriers = barriers;
    data.barriers_at_ms = now;
  }
  const clockOffset = change.coordinator ? change.coordinator.now * 1000 - now : state.clockOffset;
  return appendHistory({ ...state, data, receivedAt: now, clockOffset }, now);
}

function toRow(worker: Worker, now: number): WorkerRow {
  return { ...worker, heard_at_ms: now - worker.heartbeat_age_seconds * 1000 };
}

function mergeWorkers(
  rows: ReadonlyMap<string, WorkerRow>,
  changed: Worker[],
  removed: string[],
  now: number,
): ReadonlyMap<string, WorkerRow> {
  const next = new Map(rows);
  for (const worker of changed) next.set(worker.worker_id, toRow(worker, now));
  for (const workerId of removed) next.delete(workerId);
  return next;
}

/** Newest first, without repeats: what a resumed stream sends again is known by its id. */
export function mergeLogs(known: LogEntry[], added: LogEntry[]): LogEntry[] {
  const newest = known[0]?.id ?? Number.NEGATIVE_INFINITY;
  const fresh = added.filter((entry) => entry.id > newest).sort((a, b) => b.id - a.id);
  return fresh.length === 0 ? known : [...fresh, ...known].slice(0, LOGS_KEPT);
}

export function mergeCheckpoints(known: Checkpoint[], changed: Checkpoint[]): Checkpoint[] {
  const byId = new Map(known.map((checkpoint) => [checkpoint.checkpoint_id, checkpoint]));
  for (const checkpoint of changed) byId.set(checkpoint.checkpoint_id, checkpoint);
  return [...byId.values()].sort((a, b) => b.committed_at - a.committed_at).slice(0, CHECKPOINTS_KEPT);
}

/** One more point of the charts from the current figures, once the last is a resolution old. */
function appendHistory(state: State, now: number): State {
  const { history, data } = state;
  if (!history || !data) return state;
  const at = (now + state.clockOffset) / 1000;
  const last = history.points.at(-1);
  if (last && at - last.at < history.resolution_seconds) return state;
  const points = [...history.points, toPoint(at, data.metrics, newRate(data, last?.at ?? 0))];
  return { ...state, history: { ...history, points: points.slice(-POINTS_KEPT) } };
}

/** The rate of a checkpoint that was committed since the last point: a curve has one place for each. */
function newRate(data: JobState, since: number): number | null {
  const newest = data.checkpoints[0];
  return newest && newest.committed_at > since ? data.metrics.checkpoint_bytes_per_second : null;
}

function toPoint(at: number, metrics: Metrics, checkpointRate: number | null): HistoryPoint {
  return {
    at,
    workers_live: metrics.workers_live,
    steps_per_second: metrics.steps_per_second,
    samples_per_second: metrics.samples_per_second,
    requests_per_second: metrics.requests_per_second,
    checkpoint_bytes_per_second: checkpointRate,
    goodput: metrics.goodput,
    barrier_p50_ms: metrics.barrier_p50_ms,
    barrier_p99_ms: metrics.barrier_p99_ms,
    stragglers: metrics.stragglers,
    loss: metrics.loss,
  };
}
