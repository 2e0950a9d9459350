import type { Action, ActionRequest, Change, Dashboard, History, LogEntry, LogLevel } from "./types";

/** What a data source tells the store; the coordinator over HTTP and the simulation say it alike. */
export type SourceEvent =
  | { kind: "snapshot"; dashboard: Dashboard }
  | { kind: "change"; change: Change }
  | { kind: "connected"; via: "stream" | "polling" }
  | { kind: "disconnected"; message: string; retryAt: number; attempt: number }
  | { kind: "connecting" };

export type Sink = (event: SourceEvent) => void;

export interface Connection {
  close(): void;
  retryNow(): void;
}

export interface LogQuery {
  job: string;
  search?: string;
  level?: LogLevel | "";
  event?: string;
  before?: number;
  limit?: number;
}

export type RefreshMode = "live" | "poll-2" | "poll-10" | "paused";

export interface Backend {
  readonly simulated: boolean;
  /** Where the data comes from, for people. */
  readonly address: string;
  connect(job: string | null, refresh: RefreshMode, sink: Sink): Connection;
  history(job: string, seconds: number): Promise<History>;
  logs(query: LogQuery): Promise<LogEntry[]>;
  act(request: ActionRequest): Promise<Action | null>;
  exportHref(query: LogQuery, format: "jsonl" | "csv"): string;
}
