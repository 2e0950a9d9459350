import type { Worker } from "../api/types";
import type { Random } from "./random";

export const HEARTBEAT_SECONDS = 1;
export const TIMEOUT_SECONDS = 5;
const GIB = 1024 ** 3;
const GPUS_PER_WORKER = 1;
const WORKERS_PER_HOST = 8;

/** One simulated worker: its row, and what the coordinator cannot see. */
export interface Member {
  row: Worker;
  heardAt: number;
  /** When its next heartbeat is due. */
  nextBeat: number;
  /** It has died, and nobody knows yet. */
  silent: boolean;
  speed: number;
  slowUntil: number;
}

export function newMember(workerId: string, rank: number, incarnation: number, at: number, random: Random): Member {
  const host = Math.floor(rank / WORKERS_PER_HOST);
  const row: Worker = {
    worker_id: workerId,
    rank,
    incarnation,
    membership: "live",
    state: "loading",
    step: null,
    epoch: 0,
    heartbeat_age_seconds: 0,
    hostname: `gpu-${String(host).padStart(3, "0")}.rack${host % 12}`,
    process: `pid ${20_000 + random.integer(40_000)}`,
    gpu_count: GPUS_PER_WORKER,
    registered_at: at,
    detail: "",
    metrics: {},
    step_seconds: null,
    slowness: null,
    is_straggler: false,
    cpu_percent: null,
    memory_used_bytes: null,
    memory_total_bytes: 256 * GIB,
    gpus: [],
  };
  return {
    row,
    heardAt: at,
    nextBeat: at + random.next() * HEARTBEAT_SECONDS,
    silent: false,
    speed: 1 + 0.02 * random.normal(),
    slowUntil: 0,
  };
}

export interface Beat {
  at: number;
  state: string;
  step: number;
  epoch: number;
  baseSeconds: number;
  loss: number;
}

/** What a heartbeat tells. The slowest decides the pace of all, so a slow worker is seen by its own step time. */
export function beat(member: Member, b: Beat, random: Random): void {
  const { row } = member;
  const slow = b.at < member.slowUntil ? 1.72 : 1;
  const busy = b.state === "training";
  const seconds = b.baseSeconds * member.speed * slow * (1 + 0.015 * random.normal());
  member.heardAt = b.at;
  member.nextBeat = b.at + HEARTBEAT_SECONDS * (0.97 + 0.06 * random.next());
  const utilization = busy ? 96 - 14 * (slow - 1) + 2 * random.normal() : 4 + 3 * random.next();
  member.row = {
    ...row,
    state: b.state,
    step: b.step,
    epoch: b.epoch,
    step_seconds: seconds,
    slowness: seconds / b.baseSeconds,
    is_straggler: slow > 1,
    detail: slow > 1 ? "input pipeline is slow: 41% of the step waits for data" : "",
    cpu_percent: clamp((busy ? 46 : 18) + 30 * (slow - 1) + 5 * random.normal(), 1, 100),
    memory_used_bytes: Math.round((96 + 6 * Math.sin(row.rank) + random.next()) * GIB),
    gpus: Array.from({ length: GPUS_PER_WORKER }, () => ({
      utilization_percent: clamp(utilization, 0, 100),
      memory_used_bytes: Math.round((61.5 + 2 * Math.sin(row.rank * 3)) * GIB),
      memory_total_bytes: 80 * GIB,
    })),
    metrics: { loss: b.loss * (1 + 0.01 * random.normal()), data_wait_seconds: seconds * (slow > 1 ? 0.41 : 0.02) },
  };
}

/** The row as it is read at `now`. */
export function readRow(member: Member, now: number): Worker {
  return { ...member.row, heartbeat_age_seconds: Math.max(0, now - member.heardAt) };
}

function clamp(value: number, low: number, high: number): number {
  return Math.min(high, Math.max(low, value));
}
