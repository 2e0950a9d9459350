import type { Barriers, Checkpoint } from "../api/types";
import type { Random } from "./random";

const FULL_BYTES = 14_815_133_696;
const FULL_EVERY = 5;
const KEPT = 12;
const TO_BE_DROPPED = 2;

/** The checkpoints of the simulated run, newest last. */
export class CheckpointShelf {
  private items: Checkpoint[] = [];
  committed = 0;

  /** What is new or looks different, and what retention took away. */
  commit(step: number, epoch: number, at: number, seconds: number, ranks: number, random: Random) {
    const isFull = this.committed % FULL_EVERY === 0;
    this.committed += 1;
    const written = isFull ? FULL_BYTES : Math.round(FULL_BYTES * random.between(0.09, 0.21));
    const checkpoint: Checkpoint = {
      checkpoint_id: `step-${String(step).padStart(8, "0")}`,
      step,
      epoch,
      path: `s3://checkpoints/pretrain-7b/step-${String(step).padStart(8, "0")}`,
      size_bytes: FULL_BYTES,
      is_full: isFull,
      parts: ranks,
      worker_id: "worker-0",
      committed_at: at,
      duration_seconds: seconds,
      written_bytes: written,
      verified: null,
      verified_at: null,
      verified_by: "",
      will_be_dropped: false,
      metadata: { world_size: String(ranks), trigger: "every 90 s" },
    };
    this.items.push(checkpoint);
    const removed = this.items.length > KEPT ? this.items.splice(0, this.items.length - KEPT) : [];
    const changed = this.review();
    return { checkpoint, changed, removed: removed.map((item) => item.checkpoint_id) };
  }

  /** The one before the newest has been verified by now; the oldest go next. */
  private review(): Checkpoint[] {
    const before = this.items;
    const now = before.at(-1)?.committed_at ?? 0;
    this.items = before.map((item, index) => ({
      ...item,
      ...(index < before.length - 1 && item.verified === null ? { verified: true, verified_at: now } : {}),
      will_be_dropped: before.length >= KEPT && index < TO_BE_DROPPED,
    }));
    return this.items.filter((item, index) => {
      const old = before[index];
      return (
        index === before.length - 1 || old?.verified !== item.verified || old.will_be_dropped !== item.will_be_dropped
      );
    });
  }

  newestFirst(): Checkpoint[] {
    return [...this.items].reverse();
  }
}

const BUCKETS_MS = [5, 10, 20, 40, 60, 80, 120, 160, 240, 400, 800, 1600, 6400];

/** Latencies of the barriers that completed. */
export class BarrierBook {
  private readonly counts = BUCKETS_MS.map(() => 0);
  private recent: number[] = [];
  completed = 0;
  open: Barriers["open"] = [];

  complete(latencyMs: number): void {
    const bucket = BUCKETS_MS.findIndex((edge) => latencyMs <= edge);
    const index = bucket < 0 ? BUCKETS_MS.length - 1 : bucket;
    this.counts[index] = (this.counts[index] ?? 0) + 1;
    this.completed += 1;
    this.recent = [...this.recent, latencyMs].slice(-200);
  }

  read(): Barriers {
    return {
      open: this.open,
      completed_total: this.completed,
      measured: this.recent.length,
      p50_ms: this.quantile(0.5),
      p99_ms: this.quantile(0.99),
      histogram: BUCKETS_MS.map((le_ms, index) => ({ le_ms, count: this.counts[index] ?? 0 })),
    };
  }

  private quantile(q: number): number | null {
    if (this.recent.length === 0) return null;
    const sorted = [...this.recent].sort((a, b) => a - b);
    return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] ?? null;
  }
}
