import type {
  Action,
  ActionRequest,
  Change,
  Dashboard,
  Dataset,
  History,
  HistoryPoint,
  LogEntry,
  LogLevel,
  Worker,
} from "../api/types";
import { simulatedDatasets, TRAIN_SAMPLES, TRAIN_SHARDS } from "./data";
import { beat, type Member, newMember, readRow } from "./fleet";
import { Incidents } from "./incidents";
import { Outbox } from "./outbox";
import { Random } from "./random";
import { describeCoordinator, describeMetrics, describeTasks, JOB } from "./report";
import { BarrierBook, CheckpointShelf } from "./storage";

export const TICK_SECONDS = 0.5;
const PREROLL_SECONDS = 1200;
/** Rows need no figures while nobody can see them yet. */
const UNSEEN_SECONDS = 5;
const BASE_STEP_SECONDS = 0.42;
const SAMPLES_PER_STEP_AND_WORKER = 96;
const CHECKPOINT_EVERY = 90;
const POINT_EVERY = 4;
const GOODPUT_TICKS = 1200;

export type Phase = "training" | "recovering" | "stopped";

export interface SimulationOptions {
  workers: number;
  seed: number;
  /** The moment the page opens, seconds since 1970. */
  startAt: number;
}

/** A run that never was: the same options give the same run, tick for tick. */
export class Simulation {
  now: number;
  step = 2_930;
  samples = 18_000_000;
  phase: Phase = "training";
  generation = 1;
  stepsPerSecond = 0;
  /** Of the newest checkpoint, in bytes per second. */
  checkpointRate: number | null = null;
  private committed = false;
  actions: Action[] = [];
  readonly startedAt: number;
  readonly random: Random;
  readonly members = new Map<string, Member>();
  readonly shelf = new CheckpointShelf();
  readonly barriers = new BarrierBook();
  readonly incidents: Incidents;
  readonly productive: boolean[] = [];

  private readonly points: HistoryPoint[] = [];
  private readonly outbox = new Outbox();
  private readonly leaving: { workerId: string; at: number }[] = [];
  private lastChange: Dataset["last_change"] = null;
  private ticks = 0;
  private nextBarrierAt: number;
  private nextCheckpointAt: number;
  private checkpointEndsAt: number | null = null;
  private resumeAt = 0;

  constructor(readonly options: SimulationOptions) {
    this.random = new Random(options.seed);
    this.now = options.startAt - PREROLL_SECONDS;
    this.startedAt = this.now - 1_320;
    for (let rank = 0; rank < options.workers; rank += 1) {
      this.join(`worker-${rank}`, rank, 1, this.startedAt + rank / 100);
    }
    this.incidents = new Incidents(this);
    this.nextBarrierAt = this.now + 2;
    this.nextCheckpointAt = this.now + 20;
    this.log("info", "dataset.registered", `train: ${TRAIN_SAMPLES} samples in ${TRAIN_SHARDS} shards`, {
      dataset: "train",
    });
    while (this.now < options.startAt) this.tick();
  }

  get epoch(): number {
    return Math.floor(this.samples / TRAIN_SAMPLES);
  }

  get samplesPerStep(): number {
    // A large group works on the same batch, so that epochs keep their length.
    return SAMPLES_PER_STEP_AND_WORKER * Math.min(64, this.options.workers);
  }

  snapshot(): Dashboard {
    this.outbox.drain();
    return {
      ...this.always(),
      workers: [...this.members.values()].map((member) => readRow(member, this.now)),
      datasets: this.datasets(),
      checkpoints: this.shelf.newestFirst(),
      logs: this.outbox.newestLogs().slice(0, 200),
    };
  }

  /** What happened since the last call. */
  change(): Change {
    const workers: Worker[] = [...this.outbox.touched].flatMap((workerId) => {
      const member = this.members.get(workerId);
      return member ? [readRow(member, this.now)] : [];
    });
    const datasets = this.outbox.datasetsChanged || this.ticks % 20 === 0 ? { datasets: this.datasets() } : {};
    return { ...this.always(), workers, ...datasets, ...this.outbox.drain() };
  }

  history(seconds: number): History {
    const from = this.now - seconds;
    return {
      resolution_seconds: POINT_EVERY,
      points: this.points.filter((point) => point.at >= from),
      recoveries: this.incidents.recoveries.filter((recovery) => recovery.lost_at >= from),
    };
  }

  newestLogs(): LogEntry[] {
    return this.outbox.newestLogs();
  }

  request(request: ActionRequest): Action {
    const { kind, worker_id = "", reason = "" } = request;
    const message = `${kind}${worker_id ? ` of ${worker_id}` : ""} asked for`;
    const number = this.log("info", "action.requested", message, { worker: worker_id, reason });
    const action: Action = { action_id: `action-${number}`, kind, worker_id, reason, requested_at: this.now };
    this.actions = [...this.actions, action];
    if (kind === "drain") this.leaving.push({ workerId: worker_id, at: this.now + 6 });
    else this.nextCheckpointAt = Math.min(this.nextCheckpointAt, this.now + 2);
    return action;
  }

  tick(): void {
    this.now += TICK_SECONDS;
    this.ticks += 1;
    this.incidents.play();
    this.train();
    this.playBarriers();
    this.playCheckpoints();
    this.playDrains();
    this.heartbeats();
    if (this.ticks % (POINT_EVERY / TICK_SECONDS) === 0) this.record();
  }

  live(): Member[] {
    return [...this.members.values()].filter((member) => member.row.membership === "live");
  }

  log(level: LogLevel, event: string, message: string, fields: Record<string, string> = {}): number {
    return this.outbox.log(this.now, level, event, message, fields);
  }

  join(workerId: string, rank: number, incarnation: number, at: number): void {
    this.members.set(workerId, newMember(workerId, rank, incarnation, at, this.random));
    this.outbox.touched.add(workerId);
  }

  forget(workerId: string): void {
    this.members.delete(workerId);
    this.outbox.removeWorker(workerId);
  }

  /** A new generation: as few shards move as possible. */
  changeMembership(reason: string, workerId: string): void {
    const moved = Math.ceil(TRAIN_SHARDS / Math.max(1, this.options.workers));
    const samples = moved * (TRAIN_SAMPLES / TRAIN_SHARDS);
    this.generation += 1;
    this.lastChange = { at: this.now, moved_shards: moved, moved_samples: samples, reason };
    this.outbox.datasetsChanged = true;
    this.outbox.touched.add(workerId);
  }

  private always() {
    return {
      event_id: this.ticks,
      job: JOB,
      ...describeCoordinator(this),
      barriers: this.barriers.read(),
      metrics: describeMetrics(this),
      tasks: describeTasks(this),
      actions: this.actions,
    };
  }

  private datasets(): Dataset[] {
    const liveRanks = this.live().map((member) => member.row.rank);
    return simulatedDatasets({
      liveRanks: liveRanks.sort((a, b) => a - b),
      epoch: this.epoch,
      samples: Math.floor(this.samples % TRAIN_SAMPLES),
      registeredAt: this.startedAt + 8,
      workers: this.options.workers,
      lastChange: this.lastChange,
    });
  }

  private train(): void {
    const running = this.phase === "training" && !this.incidents.lost;
    this.productive.push(running);
    if (this.productive.length > GOODPUT_TICKS) this.productive.shift();
    if (!running) {
      this.stepsPerSecond = this.stepsPerSecond < 0.05 ? 0 : this.stepsPerSecond * 0.45;
      return;
    }
    const slowed = this.live().some((member) => this.now < member.slowUntil) ? 0.8 : 1;
    const saving = this.checkpointEndsAt === null ? 1 : 0.97;
    const pace = ((slowed * saving) / BASE_STEP_SECONDS) * (1 + 0.012 * this.random.normal());
    const before = this.epoch;
    this.stepsPerSecond = (this.stepsPerSecond + pace) / 2;
    this.step += pace * TICK_SECONDS;
    this.samples += pace * TICK_SECONDS * this.samplesPerStep;
    if (this.epoch > before) {
      const fields = { dataset: "train", epoch: String(before), missing: "0" };
      this.log("info", "epoch.completed", `epoch ${before} completed: every sample exactly once`, fields);
      this.outbox.datasetsChanged = true;
    }
  }

  private playBarriers(): void {
    if (this.phase !== "training" || this.now < this.nextBarrierAt) return;
    const lost = this.incidents.lost?.row;
    if (lost) {
      this.holdBarrier(lost);
      return;
    }
    this.barriers.open = [];
    const latency = 38 * Math.exp(0.55 * this.random.normal()) * (1 + this.options.workers / 900);
    this.barriers.complete(latency * (this.random.next() < 0.02 ? 9 : 1));
    this.nextBarrierAt = this.now + 1;
  }

  private holdBarrier(lost: Worker): void {
    const open = this.barriers.open[0];
    const expected = this.live().length;
    this.barriers.open = [
      {
        barrier_id: open?.barrier_id ?? `step-${Math.floor(this.step)}`,
        round: 1,
        arrived: expected - 1,
        expected,
        open_seconds: (open?.open_seconds ?? 0) + TICK_SECONDS,
        missing: [{ worker_id: lost.worker_id, step: lost.step }],
      },
    ];
  }

  private playCheckpoints(): void {
    if (this.phase === "stopped" && this.now >= this.resumeAt) {
      this.phase = "training";
      this.log("info", "run.started", "the run was started again from its last checkpoint");
    }
    if (this.phase !== "training") return;
    if (this.checkpointEndsAt === null && this.now >= this.nextCheckpointAt) {
      this.checkpointEndsAt = this.now + this.random.between(4, 8);
    }
    if (this.checkpointEndsAt === null) return;
    if (this.now >= this.checkpointEndsAt) this.commitCheckpoint();
  }

  private commitCheckpoint(): void {
    const step = Math.floor(this.step);
    const seconds = this.random.between(4, 8);
    const ranks = this.live().length;
    const made = this.shelf.commit(step, this.epoch, this.now, seconds, ranks, this.random);
    this.outbox.putCheckpoints(made.changed, made.removed);
    const gib = ((made.checkpoint.written_bytes ?? 0) / 1024 ** 3).toFixed(1);
    const fields = { checkpoint: made.checkpoint.checkpoint_id, step: String(step) };
    this.log("info", "checkpoint.committed", `step ${step} committed, ${gib} GiB written`, fields);
    this.checkpointRate = made.checkpoint.size_bytes / seconds;
    this.committed = true;
    this.checkpointEndsAt = null;
    this.nextCheckpointAt = this.now + CHECKPOINT_EVERY;
    const done = this.actions.filter((action) => action.kind !== "drain");
    for (const action of done) this.complete(action);
    if (done.some((action) => action.kind === "stop")) {
      this.phase = "stopped";
      this.resumeAt = this.now + 30;
    }
  }

  private complete(action: Action): void {
    this.actions = this.actions.filter((other) => other !== action);
    this.log("info", "action.completed", `${action.kind} done`, { action: action.action_id });
  }

  private playDrains(): void {
    for (const entry of this.leaving.filter(({ at }) => this.now >= at)) {
      this.leaving.splice(this.leaving.indexOf(entry), 1);
      for (const action of this.actions.filter((a) => a.worker_id === entry.workerId)) this.complete(action);
      const member = this.members.get(entry.workerId);
      if (member?.row.membership !== "live") continue;
      member.row = { ...member.row, membership: "left", state: "finished", detail: "drained from the dashboard" };
      this.changeMembership(`${entry.workerId} left`, entry.workerId);
      this.log("info", "worker.left", `${entry.workerId} left: drained`, { worker: entry.workerId });
    }
  }

  private heartbeats(): void {
    const unseen = this.now < this.options.startAt - UNSEEN_SECONDS;
    const common = {
      at: this.now,
      step: Math.floor(this.step),
      epoch: this.epoch,
      baseSeconds: BASE_STEP_SECONDS,
      loss: this.loss(),
    };
    for (const member of this.members.values()) {
      if (member.silent || member.row.membership !== "live" || this.now < member.nextBeat) continue;
      if (unseen) member.heardAt = this.now;
      else beat(member, { ...common, state: this.stateOf(member) }, this.random);
      this.outbox.touched.add(member.row.worker_id);
    }
  }

  private stateOf(member: Member): string {
    if (this.phase === "stopped") return "idle";
    if (this.now - member.row.registered_at < 2) return "loading";
    if (this.phase === "recovering") return "recovering";
    if (this.incidents.lost) return "waiting";
    return this.checkpointEndsAt !== null && member.row.rank % 5 === 0 ? "checkpointing" : "training";
  }

  loss(): number {
    return 1.9 + 2.4 * Math.exp(-this.step / 9_000) + 0.02 * Math.sin(this.step / 140);
  }

  private record(): void {
    const metrics = describeMetrics(this);
    this.points.push({
      at: this.now,
      workers_live: metrics.workers_live,
      steps_per_second: metrics.steps_per_second,
      samples_per_second: metrics.samples_per_second,
      requests_per_second: metrics.requests_per_second,
      checkpoint_bytes_per_second: this.committed ? metrics.checkpoint_bytes_per_second : null,
      goodput: metrics.goodput,
      barrier_p50_ms: metrics.barrier_p50_ms,
      barrier_p99_ms: metrics.barrier_p99_ms,
      stragglers: metrics.stragglers,
      loss: metrics.loss,
    });
    this.committed = false;
    if (this.points.length > 1000) this.points.shift();
  }
}
