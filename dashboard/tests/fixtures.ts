import type { Backend, Connection, RefreshMode, Sink, SourceEvent } from "../src/api/backend";
import type { ActionRequest, Change, Dashboard, History, Metrics, Worker } from "../src/api/types";
import { Simulation } from "../src/demo/simulation";

export const START = 1_800_000_000;

export function simulated(workers = 16): Simulation {
  return new Simulation({ workers, seed: 7, startAt: START });
}

export function worker(changes: Partial<Worker> = {}): Worker {
  return {
    worker_id: "worker-0",
    rank: 0,
    incarnation: 1,
    membership: "live",
    state: "training",
    step: 10,
    epoch: 0,
    heartbeat_age_seconds: 0.5,
    hostname: "host-a",
    process: "pid 1",
    gpu_count: 0,
    registered_at: START,
    detail: "",
    metrics: {},
    step_seconds: 0.4,
    slowness: 1,
    is_straggler: false,
    cpu_percent: null,
    memory_used_bytes: null,
    memory_total_bytes: null,
    gpus: [],
    ...changes,
  };
}

const NO_METRICS: Metrics = {
  workers_live: 0,
  workers_dead: 0,
  heartbeats_per_second: null,
  requests_per_second: null,
  steps_per_second: null,
  samples_per_second: null,
  goodput: null,
  checkpoint_bytes_per_second: null,
  checkpoints_committed: 0,
  barrier_p50_ms: null,
  barrier_p99_ms: null,
  barriers_measured: 0,
  assignment_ms: null,
  heartbeat_age_max_seconds: null,
  stragglers: 0,
  losses_last_hour: 0,
  recoveries_last_hour: 0,
  last_recovery_seconds: null,
  loss: null,
};

/** A coordinator that nobody has talked to yet: whatever can be unknown is. */
export function emptyDashboard(changes: Partial<Dashboard> = {}): Dashboard {
  return {
    event_id: 1,
    job: "",
    coordinator: {
      version: "1.2.3",
      grpc_address: "127.0.0.1:50051",
      http_address: "127.0.0.1:3000",
      transport: "grpc.aio",
      started_at: START - 60,
      now: START,
      uptime_seconds: 60,
      requests_total: 0,
      requests_per_second: null,
      errors_total: 0,
      event_loop_lag_ms: null,
      memory_bytes: 50_000_000,
      heartbeat_interval_ms: 1000,
      heartbeat_timeout_ms: 5000,
    },
    jobs: [],
    workers: [],
    datasets: [],
    checkpoints: [],
    barriers: { open: [], completed_total: 0, measured: 0, p50_ms: null, p99_ms: null, histogram: [] },
    metrics: NO_METRICS,
    tasks: [],
    actions: [],
    logs: [],
    ...changes,
  };
}

/** What a coordinator sends when some parts of a dashboard have changed. */
export function changed(job: string, parts: Partial<Change>): SourceEvent {
  return { kind: "change", change: { event_id: 2, job, ...parts } };
}

export const NO_HISTORY: History = { resolution_seconds: 2, points: [], recoveries: [] };

/** A backend that a test speaks for. */
export class ScriptedBackend implements Backend {
  readonly simulated = false;
  readonly address = "http://coordinator.test/";
  sink: Sink = () => undefined;
  opened: { job: string | null; refresh: RefreshMode }[] = [];
  asked: ActionRequest[] = [];
  refusal: Error | null = null;

  constructor(readonly past: History = NO_HISTORY) {}

  connect(job: string | null, refresh: RefreshMode, sink: Sink): Connection {
    this.opened.push({ job, refresh });
    this.sink = sink;
    return { close: () => undefined, retryNow: () => undefined };
  }

  async history(): Promise<History> {
    return this.past;
  }

  async logs() {
    return [];
  }

  async act(request: ActionRequest) {
    if (this.refusal) throw this.refusal;
    this.asked.push(request);
    return null;
  }

  exportHref(_query: unknown, format: "jsonl" | "csv"): string {
    return `api/logs?format=${format}`;
  }
}
