import type { WorkerRow } from "../../store/state";

export const SHOWN = ["all", "live", "dead", "left", "stragglers"] as const;
export type Shown = (typeof SHOWN)[number];

export const SHOWN_TITLES: Record<Shown, string> = {
  all: "All",
  live: "Live",
  dead: "Dead",
  left: "Left",
  stragglers: "Stragglers",
};

/** Workers of one kind that have all the words somewhere in what people look for. */
export function filterWorkers(workers: WorkerRow[], shown: Shown, search: string): WorkerRow[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (shown === "all" && words.length === 0) return workers;
  return workers.filter((worker) => {
    if (shown === "stragglers" ? !worker.is_straggler : shown !== "all" && worker.membership !== shown) return false;
    if (words.length === 0) return true;
    const text =
      `${worker.worker_id} ${worker.hostname} ${worker.state} rank:${worker.rank} ${worker.detail}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}
