import type { Backend, Connection, RefreshMode } from "../api/backend";
import { reduce, type StoreEvent } from "./reducer";
import { INITIAL_STATE, type State } from "./state";

const HISTORY_REFETCH_MS = 60_000;

/** Holds the state, and applies what comes in at most once per frame. */
export class Store {
  private state: State = INITIAL_STATE;
  private queue: StoreEvent[] = [];
  private flushScheduled = false;
  private readonly listeners = new Set<() => void>();
  private connection: Connection | null = null;
  private historyTimer = 0;
  private historySeconds = 300;
  private lossesSeen = "";
  private job: string | null = null;
  private refresh: RefreshMode = "live";

  constructor(readonly backend: Backend) {}

  getState = (): State => this.state;

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  open(job: string | null, refresh: RefreshMode): void {
    this.close();
    this.job = job;
    this.refresh = refresh;
    this.connection = this.backend.connect(job, refresh, this.dispatch);
    this.historyTimer = window.setInterval(() => void this.loadHistory(), HISTORY_REFETCH_MS);
  }

  close(): void {
    this.connection?.close();
    this.connection = null;
    window.clearInterval(this.historyTimer);
  }

  switchJob(job: string): void {
    if (job === this.state.data?.job) return;
    this.queue = [];
    this.apply([{ kind: "reset" }]);
    this.open(job, this.refresh);
  }

  setRefresh(refresh: RefreshMode): void {
    if (refresh !== this.refresh) this.open(this.job, refresh);
  }

  retryNow(): void {
    this.connection?.retryNow();
  }

  /** How far back the charts go. */
  setHistorySeconds(seconds: number): void {
    if (seconds === this.historySeconds) return;
    this.historySeconds = seconds;
    void this.loadHistory();
  }

  dispatch = (event: StoreEvent): void => {
    this.queue.push(event);
    if (this.flushScheduled) return;
    this.flushScheduled = true;
    // Frames do not come in a hidden tab, where nothing has to be drawn either.
    if (document.hidden) window.setTimeout(this.flush, 500);
    else requestAnimationFrame(this.flush);
  };

  private flush = (): void => {
    this.flushScheduled = false;
    const events = this.queue;
    this.queue = [];
    this.apply(events);
  };

  private apply(events: StoreEvent[]): void {
    const now = Date.now();
    const next = events.reduce((state, event) => reduce(state, event, now), this.state);
    if (next === this.state) return;
    const jobChanged = next.data !== null && next.data.job !== this.state.data?.job;
    this.state = next;
    for (const listener of this.listeners) listener();
    if (jobChanged || this.recoveriesChanged(next)) void this.loadHistory();
  }

  /** The chart's recoveries come with the history alone, so a loss or a return asks for it again. */
  private recoveriesChanged(state: State): boolean {
    const metrics = state.data?.metrics;
    if (!metrics) return false;
    const seen = `${metrics.losses_last_hour}/${metrics.recoveries_last_hour}/${metrics.workers_dead}`;
    const changed = this.lossesSeen !== "" && this.lossesSeen !== seen;
    this.lossesSeen = seen;
    return changed;
  }

  private async loadHistory(): Promise<void> {
    const job = this.state.data?.job;
    if (job === undefined) return;
    const seconds = this.historySeconds;
    try {
      const history = await this.backend.history(job, seconds);
      const current = this.state.data?.job === job && this.historySeconds === seconds;
      if (current) this.dispatch({ kind: "history", history });
    } catch {
      // The connection's own state says that the coordinator is away; charts keep what they have.
    }
  }
}
