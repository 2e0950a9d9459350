import type { Connection, RefreshMode, Sink } from "./backend";
import { readEventStream, type ServerEvent } from "./eventStream";
import { requestJson, withQuery } from "./request";
import type { Change, Dashboard } from "./types";

const SILENCE_MS = 40_000;
/** A proxy that holds streams back lets nothing through at all: that is noticed sooner. */
const FIRST_SNAPSHOT_MS = 10_000;
const POLL_MS = 2_000;
/** How often a stream is tried again while polling works. */
const STREAM_RETRY_MS = 60_000;
const STREAM_FAILURES_BEFORE_POLLING = 2;

/** 0.5 s, 1 s, 2 s ... up to 15 s, with a fifth of it at random so that many tabs do not come together. */
export function backoffMs(attempt: number, random: () => number = Math.random): number {
  return Math.min(15_000, 500 * 2 ** Math.max(0, attempt - 1)) * (0.8 + 0.4 * random());
}

/** One job's stream of events; polls where streams do not pass, and comes back by itself. */
export class LiveConnection implements Connection {
  private lastEventId: string | null = null;
  private attempt = 0;
  private streamFailures = 0;
  private pollUntil = 0;
  private closed = false;
  private readonly abort = new AbortController();
  private wake: (() => void) | null = null;

  constructor(
    private readonly base: string,
    private readonly job: string | null,
    private readonly refresh: RefreshMode,
    private readonly sink: Sink,
  ) {
    void this.run();
  }

  close(): void {
    this.closed = true;
    this.abort.abort();
    this.wake?.();
  }

  retryNow(): void {
    this.wake?.();
  }

  private async run(): Promise<void> {
    while (!this.closed) {
      try {
        if (this.attempt > 0) this.sink({ kind: "connecting" });
        await this.readOnce();
      } catch (error) {
        if (!this.closed) await this.waitBeforeRetry(error);
      }
    }
  }

  private async readOnce(): Promise<void> {
    if (this.refresh === "paused") {
      await this.poll();
      await this.sleep(24 * 3600_000);
    } else if (this.refresh !== "live") {
      await this.poll();
      await this.sleep(this.refresh === "poll-10" ? 10_000 : POLL_MS);
    } else if (Date.now() < this.pollUntil) {
      await this.poll();
      await this.sleep(POLL_MS);
    } else {
      await this.stream();
    }
  }

  private async stream(): Promise<void> {
    let delivered = false;
    try {
      await readEventStream({
        url: withQuery(new URL("api/events", this.base).href, { job: this.job }),
        lastEventId: this.lastEventId,
        signal: this.abort.signal,
        silenceMs: SILENCE_MS,
        firstByteMs: this.lastEventId === null ? FIRST_SNAPSHOT_MS : SILENCE_MS,
        onOpen: () => {
          // A resumed stream may have nothing to say for a while.
          if (this.lastEventId !== null) this.connected("stream");
        },
        onEvent: (event) => {
          if (!delivered) this.connected("stream");
          delivered = true;
          this.deliver(event);
        },
      });
      throw new Error("the coordinator closed the stream");
    } catch (error) {
      if (this.closed || delivered) throw error;
      this.streamFailures += 1;
      if (this.streamFailures < STREAM_FAILURES_BEFORE_POLLING) throw error;
      // Only an answer shows that it is the stream that fails, and not the coordinator that is away.
      await this.poll();
      this.pollUntil = Date.now() + STREAM_RETRY_MS;
    }
  }

  private async poll(): Promise<void> {
    const url = withQuery(new URL("api/dashboard", this.base).href, { job: this.job });
    const dashboard = await requestJson<Dashboard>(url, { signal: this.abort.signal });
    if (this.closed) return;
    this.connected("polling");
    this.lastEventId = String(dashboard.event_id);
    this.sink({ kind: "snapshot", dashboard });
  }

  private connected(via: "stream" | "polling"): void {
    this.attempt = 0;
    if (via === "stream") this.streamFailures = 0;
    this.sink({ kind: "connected", via });
  }

  private deliver(event: ServerEvent): void {
    if (event.id) this.lastEventId = event.id;
    if (event.event === "snapshot") {
      this.sink({ kind: "snapshot", dashboard: JSON.parse(event.data) as Dashboard });
    } else if (event.event === "change") {
      this.sink({ kind: "change", change: JSON.parse(event.data) as Change });
    }
  }

  private async waitBeforeRetry(error: unknown): Promise<void> {
    this.attempt += 1;
    const pause = backoffMs(this.attempt);
    const message = error instanceof Error ? error.message : String(error);
    this.sink({ kind: "disconnected", message, retryAt: Date.now() + pause, attempt: this.attempt });
    await this.sleep(pause);
  }

  private sleep(ms: number): Promise<void> {
    if (this.closed) return Promise.resolve();
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
