/** The objects of docs/http-api.md, as the coordinator sends them. Times are seconds since 1970, sizes bytes. */

export interface Dashboard {
  event_id: number;
  job: string;
  coordinator: Coordinator;
  jobs: Job[];
  workers: Worker[];
  datasets: Dataset[];
  checkpoints: Checkpoint[];
  barriers: Barriers;
  metrics: Metrics;
  tasks: Task[];
  actions: Action[];
  logs: LogEntry[];
}

/** A `change` event: a dashboard of which only what has changed is there. */
export type Change = Partial<Dashboard> & { removed_workers?: string[]; removed_checkpoints?: string[] };

export interface Coordinator {
  version: string;
  grpc_address: string;
  http_address: string;
  transport: string;
  started_at: number;
  now: number;
  uptime_seconds: number;
  requests_total: number;
  requests_per_second: number | null;
  errors_total: number;
  event_loop_lag_ms: number | null;
  memory_bytes: number;
  heartbeat_interval_ms: number;
  heartbeat_timeout_ms: number;
}

export interface Job {
  job: string;
  generation: number;
  world_size: number;
  live_workers: number;
  dead_workers: number;
  epoch: number;
  created_at: number | null;
  last_active_at: number;
}

export type Membership = "live" | "dead" | "left";

export interface Gpu {
  utilization_percent: number;
  memory_used_bytes: number;
  memory_total_bytes: number;
}

export interface Worker {
  worker_id: string;
  rank: number;
  incarnation: number;
  membership: Membership;
  state: string;
  step: number | null;
  epoch: number;
  heartbeat_age_seconds: number;
  hostname: string;
  process: string;
  gpu_count: number;
  registered_at: number;
  detail: string;
  metrics: Record<string, number>;
  step_seconds: number | null;
  slowness: number | null;
  is_straggler: boolean;
  cpu_percent: number | null;
  memory_used_bytes: number | null;
  memory_total_bytes: number | null;
  gpus: Gpu[];
}

export interface Coverage {
  epoch: number;
  total: number;
  covered: number;
  missing: number;
  repeated: number;
  assumed: number;
  dropped: number;
  complete: boolean;
  exact: boolean;
  workers: number;
  ended_incomplete: boolean;
}

export interface RankShare {
  rank: number;
  shards: number;
  samples: number;
}

export interface Dataset {
  dataset_id: string;
  path: string;
  format: string;
  total_samples: number;
  shard_size: number;
  shard_count: number;
  total_bytes: number | null;
  shuffle: boolean;
  seed: number;
  registered_at: number;
  shards_per_rank: RankShare[];
  last_change: { at: number; moved_shards: number; moved_samples: number; reason: string } | null;
  coverage: Coverage[];
}

export interface Checkpoint {
  checkpoint_id: string;
  step: number;
  epoch: number;
  path: string;
  size_bytes: number;
  is_full: boolean;
  parts: number;
  worker_id: string;
  committed_at: number;
  duration_seconds: number | null;
  written_bytes: number | null;
  verified: boolean | null;
  verified_at: number | null;
  /** The worker that read it; empty: an operator. */
  verified_by: string;
  will_be_dropped: boolean | null;
  metadata: Record<string, string>;
}

export interface OpenBarrier {
  barrier_id: string;
  round: number;
  arrived: number;
  expected: number;
  open_seconds: number;
  missing: { worker_id: string; step: number | null }[];
}

export interface Barriers {
  open: OpenBarrier[];
  completed_total: number;
  /** Of how many rounds, those of the last ten minutes, the quantiles are. */
  measured: number;
  p50_ms: number | null;
  p99_ms: number | null;
  histogram: { le_ms: number; count: number }[];
}

export interface Metrics {
  workers_live: number;
  workers_dead: number;
  heartbeats_per_second: number | null;
  requests_per_second: number | null;
  steps_per_second: number | null;
  samples_per_second: number | null;
  goodput: number | null;
  checkpoint_bytes_per_second: number | null;
  checkpoints_committed: number;
  barrier_p50_ms: number | null;
  barrier_p99_ms: number | null;
  barriers_measured: number;
  assignment_ms: number | null;
  heartbeat_age_max_seconds: number | null;
  stragglers: number;
  losses_last_hour: number;
  recoveries_last_hour: number;
  last_recovery_seconds: number | null;
  loss: number | null;
}

export type TaskState = "waiting" | "running" | "recovering" | "finished" | "stopped" | "idle";

export interface Task {
  task_id: string;
  job: string;
  state: TaskState;
  epoch: number;
  epochs: number | null;
  completed_epochs: number;
  step: number | null;
  total_steps: number | null;
  samples: number | null;
  total_samples: number | null;
  progress: number | null;
  eta_seconds: number | null;
  started_at: number;
  steps_per_second: number | null;
  metrics: Record<string, number>;
}

export type ActionKind = "checkpoint" | "stop" | "drain";

export interface Action {
  action_id: string;
  kind: ActionKind;
  worker_id: string;
  reason: string;
  requested_at: number;
}

export type LogLevel = "info" | "warning" | "error";

export interface LogEntry {
  id: number;
  at: number;
  level: LogLevel;
  event: string;
  job: string;
  message: string;
  fields: Record<string, string>;
}

export interface HistoryPoint {
  at: number;
  workers_live: number;
  steps_per_second: number | null;
  samples_per_second: number | null;
  requests_per_second: number | null;
  checkpoint_bytes_per_second: number | null;
  goodput: number | null;
  barrier_p50_ms: number | null;
  barrier_p99_ms: number | null;
  stragglers: number;
  loss: number | null;
}

export interface Recovery {
  lost_at: number;
  detected_at: number;
  training_at: number | null;
  worker_id: string;
}

export interface History {
  resolution_seconds: number;
  points: HistoryPoint[];
  recoveries: Recovery[];
}
