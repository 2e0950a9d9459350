import type { Coverage, Dataset } from "../api/types";

export const TRAIN_SAMPLES = 9_437_184;
export const TRAIN_SHARDS = 4_608;
const EVAL_SAMPLES = 120_000;
const EVAL_SHARDS = 96;
const RANKS_SHOWN = 1_024;

interface Dealing {
  liveRanks: number[];
  epoch: number;
  samples: number;
  registeredAt: number;
  workers: number;
  lastChange: Dataset["last_change"];
}

export function simulatedDatasets(d: Dealing): Dataset[] {
  return [trainDataset(d), evalDataset(d)];
}

function trainDataset(d: Dealing): Dataset {
  const done = Array.from({ length: d.epoch }, (_, epoch) => coverage(epoch, TRAIN_SAMPLES, d.workers));
  return {
    dataset_id: "train",
    path: "s3://corpora/fineweb-edu-10bt",
    format: "parquet",
    total_samples: TRAIN_SAMPLES,
    shard_size: TRAIN_SAMPLES / TRAIN_SHARDS,
    shard_count: TRAIN_SHARDS,
    total_bytes: 30_418_239_744,
    shuffle: true,
    seed: 1234,
    registered_at: d.registeredAt,
    shards_per_rank: deal(d.liveRanks, TRAIN_SHARDS, TRAIN_SAMPLES / TRAIN_SHARDS),
    last_change: d.lastChange,
    coverage: [...done, coverage(d.epoch, d.samples, d.workers)].slice(-4),
  };
}

function evalDataset(d: Dealing): Dataset {
  return {
    dataset_id: "eval",
    path: "s3://corpora/eval-suite/held-out.jsonl",
    format: "jsonl",
    total_samples: EVAL_SAMPLES,
    shard_size: EVAL_SAMPLES / EVAL_SHARDS,
    shard_count: EVAL_SHARDS,
    total_bytes: 412_090_368,
    shuffle: false,
    seed: 0,
    registered_at: d.registeredAt + 3,
    shards_per_rank: deal(d.liveRanks, EVAL_SHARDS, EVAL_SAMPLES / EVAL_SHARDS),
    last_change: null,
    coverage: [],
  };
}

function deal(ranks: number[], shards: number, shardSize: number): Dataset["shards_per_rank"] {
  const n = Math.max(1, ranks.length);
  return ranks.slice(0, RANKS_SHOWN).map((rank, index) => {
    const own = Math.floor(shards / n) + (index < shards % n ? 1 : 0);
    return { rank, shards: own, samples: Math.round(own * shardSize) };
  });
}

function coverage(epoch: number, covered: number, workers: number): Coverage {
  const complete = covered >= TRAIN_SAMPLES;
  return {
    epoch,
    total: TRAIN_SAMPLES,
    covered: Math.min(covered, TRAIN_SAMPLES),
    missing: Math.max(0, TRAIN_SAMPLES - covered),
    repeated: 0,
    assumed: 0,
    dropped: 0,
    complete,
    exact: true,
    workers,
    ended_incomplete: false,
  };
}
