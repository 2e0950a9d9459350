import type { Coverage, Dataset, Membership, Task } from "../api/types";
import type { JobState, WorkerRow } from "./state";

/** Remembers the last result for the same argument: derived data is made once per change, not once per reader. */
export function memoise<A, R>(compute: (argument: A) => R): (argument: A) => R {
  let last: { argument: A; result: R } | null = null;
  return (argument) => {
    if (!last || last.argument !== argument) last = { argument, result: compute(argument) };
    return last.result;
  };
}

const ofWorkers = memoise((workers: ReadonlyMap<string, WorkerRow>) =>
  [...workers.values()].sort((a, b) => a.rank - b.rank || b.incarnation - a.incarnation),
);

/** All workers, by rank. */
export const workersByRank = (data: JobState): WorkerRow[] => ofWorkers(data.workers);

export interface WorkerCounts extends Record<Membership, number> {
  all: number;
  stragglers: number;
  /** Live ones that report how long their steps take. */
  timed: number;
}

const counted = memoise((workers: ReadonlyMap<string, WorkerRow>): WorkerCounts => {
  const counts: WorkerCounts = { all: workers.size, live: 0, dead: 0, left: 0, stragglers: 0, timed: 0 };
  for (const worker of workers.values()) {
    counts[worker.membership] += 1;
    if (worker.is_straggler) counts.stragglers += 1;
    if (worker.membership === "live" && worker.step_seconds !== null) counts.timed += 1;
  }
  return counts;
});

export const workerCounts = (data: JobState): WorkerCounts => counted(data.workers);

export interface IncompleteEpoch {
  datasetId: string;
  coverage: Coverage;
}

const lacking = memoise((datasets: Dataset[]): IncompleteEpoch[] =>
  datasets.flatMap((dataset) =>
    dataset.coverage
      .filter((coverage) => coverage.ended_incomplete)
      .map((coverage) => ({ datasetId: dataset.dataset_id, coverage })),
  ),
);

/** Epochs that ended although samples are missing. */
export const incompleteEpochs = (data: JobState): IncompleteEpoch[] => lacking(data.datasets);

const TASK_ORDER: Record<Task["state"], number> = {
  recovering: 0,
  running: 1,
  waiting: 2,
  idle: 3,
  stopped: 4,
  finished: 5,
};

/** The run that matters now: the newest of those that are going on. */
export function currentTask(data: JobState): Task | null {
  const ordered = [...data.tasks].sort(
    (a, b) => TASK_ORDER[a.state] - TASK_ORDER[b.state] || b.started_at - a.started_at,
  );
  return ordered[0] ?? null;
}

const eventNames = memoise((logs: JobState["logs"]) => [...new Set(logs.map((entry) => entry.event))].sort());
export const logEvents = (data: JobState): string[] => eventNames(data.logs);
