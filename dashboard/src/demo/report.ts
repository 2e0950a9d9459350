import type { Coordinator, Job, Metrics, Task } from "../api/types";
import { TRAIN_SAMPLES } from "./data";
import type { Simulation } from "./simulation";

export const JOB = "pretrain-7b";
const EPOCHS = 12;

export function describeCoordinator(sim: Simulation): { coordinator: Coordinator; jobs: Job[] } {
  const uptime = sim.now - sim.startedAt;
  const rate = requestRate(sim);
  const live = sim.live().length;
  return {
    coordinator: {
      version: "simulated",
      grpc_address: "10.0.0.4:50051",
      http_address: "10.0.0.4:3000",
      transport: "pygrpc-native",
      started_at: sim.startedAt,
      now: sim.now,
      uptime_seconds: uptime,
      requests_total: Math.floor(uptime * rate),
      requests_per_second: rate,
      errors_total: 3,
      event_loop_lag_ms: 0.4,
      memory_bytes: 61_000_000 + sim.options.workers * 9_000,
      heartbeat_interval_ms: 1000,
      heartbeat_timeout_ms: 5000,
    },
    jobs: [
      {
        job: JOB,
        generation: sim.generation,
        world_size: sim.options.workers,
        live_workers: live,
        dead_workers: sim.members.size - live,
        epoch: sim.epoch,
        created_at: sim.startedAt,
        last_active_at: sim.now,
      },
    ],
  };
}

function requestRate(sim: Simulation): number {
  return sim.live().length * 1.31;
}

export function describeMetrics(sim: Simulation): Metrics {
  const live = sim.live();
  const { recoveries } = sim.incidents;
  const done = recoveries.filter((recovery) => recovery.training_at !== null);
  const last = done.at(-1);
  const barriers = sim.barriers.read();
  const works = sim.phase !== "stopped";
  const productive = sim.productive.filter(Boolean).length;
  return {
    workers_live: live.length,
    workers_dead: [...sim.members.values()].filter((member) => member.row.membership === "dead").length,
    heartbeats_per_second: live.length,
    requests_per_second: requestRate(sim),
    steps_per_second: works ? sim.stepsPerSecond : null,
    samples_per_second: works ? sim.stepsPerSecond * sim.samplesPerStep : null,
    goodput: works && sim.productive.length ? productive / sim.productive.length : null,
    checkpoint_bytes_per_second: sim.checkpointRate,
    checkpoints_committed: sim.shelf.committed,
    barrier_p50_ms: barriers.p50_ms,
    barrier_p99_ms: barriers.p99_ms,
    barriers_measured: barriers.measured,
    assignment_ms: 0.3 + sim.options.workers / 400,
    heartbeat_age_max_seconds: live.reduce((oldest, member) => Math.max(oldest, sim.now - member.heardAt), 0),
    stragglers: live.filter((member) => sim.now < member.slowUntil).length,
    losses_last_hour: recoveries.length,
    recoveries_last_hour: done.length,
    last_recovery_seconds: last?.training_at ? last.training_at - last.lost_at : null,
    loss: works ? sim.loss() : null,
  };
}

export function describeTasks(sim: Simulation): Task[] {
  const total = EPOCHS * TRAIN_SAMPLES;
  const rate = sim.stepsPerSecond * sim.samplesPerStep;
  const progress = Math.min(1, sim.samples / total);
  const state = sim.phase === "training" ? "running" : sim.phase;
  const running: Task = {
    task_id: JOB,
    job: JOB,
    state,
    epoch: sim.epoch,
    epochs: EPOCHS,
    completed_epochs: sim.epoch,
    step: Math.floor(sim.step),
    total_steps: Math.floor(total / sim.samplesPerStep),
    samples: Math.floor(sim.samples),
    total_samples: total,
    progress,
    eta_seconds: sim.phase === "training" && rate > 1000 ? (total - sim.samples) / rate : null,
    started_at: sim.startedAt + 12,
    steps_per_second: sim.phase === "stopped" ? null : sim.stepsPerSecond,
    metrics: { loss: sim.loss(), learning_rate: 0.0003 * (1 - 0.9 * progress), grad_norm: 0.83 },
  };
  const warmUp: Task = {
    task_id: "warm-up",
    job: JOB,
    state: "finished",
    epoch: 1,
    epochs: 1,
    completed_epochs: 1,
    step: 2_000,
    total_steps: 2_000,
    samples: 768_000,
    total_samples: 768_000,
    progress: 1,
    eta_seconds: null,
    started_at: sim.startedAt - 1900,
    steps_per_second: null,
    metrics: { loss: 6.21 },
  };
  return [running, warmUp];
}
