import type { Backend, Connection, LogQuery, RefreshMode, Sink } from "./backend";
import { LiveConnection } from "./liveConnection";
import { requestJson, withQuery } from "./request";
import type { Action, ActionRequest, History, LogEntry } from "./types";

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
