import type { ActionRequest, Backend, Connection, LogQuery, Preview, RefreshMode, Sink } from "./backend";
import { LiveConnection } from "./liveConnection";
import { requestJson, withQuery } from "./request";
import type { Action, History, LogEntry } from "./types";

/** A coordinator, reached below the folder that serves this page. */
export class HttpBackend implements Backend {
  readonly simulated = false;
  readonly address: string;

  constructor(base: string = new URL(".", document.baseURI).href) {
    this.address = base;
  }

  connect(job: string | null, refresh: RefreshMode, sink: Sink): Connection {
    return new LiveConnection(this.address, job, refresh, sink);
  }

  history(job: string, seconds: number): Promise<History> {
    return requestJson(this.url("api/history", { job, seconds }));
  }

  async preview(job: string, datasetId: string, rows: number): Promise<Preview> {
    const path = `api/datasets/${encodeURIComponent(datasetId)}/preview`;
    return toPreview(await requestJson<unknown>(this.url(path, { job, rows })));
  }

  async logs(query: LogQuery): Promise<LogEntry[]> {
    const page = await requestJson<{ items: LogEntry[] }>(this.url("api/logs", { ...query }));
    return page.items;
  }

  act(request: ActionRequest): Promise<Action | null> {
    return requestJson(this.url("api/actions", {}), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
    });
  }

  exportHref(query: LogQuery, format: "jsonl" | "csv"): string {
    return this.url("api/logs", { ...query, format });
  }

  private url(path: string, query: Record<string, string | number | null | undefined>): string {
    return withQuery(new URL(path, this.address).href, query);
  }
}

/** Rows as lists of text, whether they came as lists or as objects. */
export function toPreview(body: unknown): Preview {
  const source = body as { columns?: unknown[]; rows?: unknown[]; items?: unknown[] } | unknown[];
  const rows = Array.isArray(source) ? source : (source.rows ?? source.items ?? []);
  const named = Array.isArray(source) ? undefined : source.columns?.map(columnName);
  const first = rows[0];
  const columns =
    named ?? (isRecord(first) ? Object.keys(first) : Array.isArray(first) ? first.map((_, i) => `${i}`) : ["value"]);
  const cells = rows.map((row) => {
    if (Array.isArray(row)) return row.map(cellText);
    if (isRecord(row)) return columns.map((column) => cellText(row[column]));
    return [cellText(row)];
  });
  return { columns, rows: cells };
}

function columnName(column: unknown): string {
  return isRecord(column) ? String(column.name ?? "") : String(column);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function cellText(value: unknown): string {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
