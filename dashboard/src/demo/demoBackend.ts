import type { Backend, Connection, LogQuery, RefreshMode, Sink } from "../api/backend";
import type { Action, ActionRequest, History, LogEntry } from "../api/types";
import { Simulation, TICK_SECONDS } from "./simulation";

export const DEMO_SEED = 7;
const DEFAULT_WORKERS = 64;
const MOST_WORKERS = 10_000;

/** Speaks like a coordinator, out of a simulation in this page. */
export class DemoBackend implements Backend {
  readonly simulated = true;
  readonly address: string;
  readonly simulation: Simulation;

  constructor(workers = DEFAULT_WORKERS, startAt = Math.floor(Date.now() / 1000)) {
    const some = Math.max(2, Math.min(MOST_WORKERS, Math.round(workers) || DEFAULT_WORKERS));
    this.simulation = new Simulation({ workers: some, seed: DEMO_SEED, startAt });
    this.address = `a simulation in this browser, ${some} workers`;
  }

  connect(_job: string | null, refresh: RefreshMode, sink: Sink): Connection {
    sink({ kind: "connected", via: "stream" });
    sink({ kind: "snapshot", dashboard: this.simulation.snapshot() });
    if (refresh === "paused") return { close: () => undefined, retryNow: () => undefined };
    const every = refresh === "poll-10" ? 10 : refresh === "poll-2" ? 2 : TICK_SECONDS;
    const timer = window.setInterval(() => {
      // A tab that slept catches up, but not through the night.
      const due = Math.min(240, (Date.now() / 1000 - this.simulation.now) / TICK_SECONDS);
      for (let tick = 0; tick < Math.max(1, Math.floor(due)); tick += 1) this.simulation.tick();
      sink({ kind: "change", change: this.simulation.change() });
    }, every * 1000);
    return { close: () => window.clearInterval(timer), retryNow: () => undefined };
  }

  async history(_job: string, seconds: number): Promise<History> {
    return this.simulation.history(seconds);
  }

  async logs(query: LogQuery): Promise<LogEntry[]> {
    return this.matching(query).slice(0, query.limit ?? 200);
  }

  async act(request: ActionRequest): Promise<Action> {
    return this.simulation.request(request);
  }

  exportHref(query: LogQuery, format: "jsonl" | "csv"): string {
    const entries = this.matching(query);
    const lines =
      format === "jsonl"
        ? entries.map((entry) => JSON.stringify(entry))
        : [
            "id,at,level,event,message",
            ...entries.map((e) => [e.id, e.at, e.level, e.event, JSON.stringify(e.message)].join(",")),
          ];
    return `data:text/plain;charset=utf-8,${encodeURIComponent(lines.join("\n"))}`;
  }

  private matching(query: LogQuery): LogEntry[] {
    const words = query.search?.toLowerCase() ?? "";
    return this.simulation
      .newestLogs()
      .filter(
        (entry) =>
          (query.before === undefined || entry.id < query.before) &&
          (!query.level || entry.level === query.level) &&
          (!query.event || entry.event === query.event) &&
          (!words || `${entry.message} ${entry.event}`.toLowerCase().includes(words)),
      );
  }
}
