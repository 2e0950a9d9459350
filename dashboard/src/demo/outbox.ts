import type { Change, Checkpoint, LogEntry, LogLevel } from "../api/types";
import { JOB } from "./report";

const LOGS_KEPT = 600;

/** Collects what has changed since somebody last asked. */
export class Outbox {
  readonly touched = new Set<string>();
  datasetsChanged = false;
  private logs: LogEntry[] = [];
  private freshLogs: LogEntry[] = [];
  private removedWorkers: string[] = [];
  private checkpoints: Checkpoint[] = [];
  private removedCheckpoints: string[] = [];
  private lastLogId = 0;

  log(at: number, level: LogLevel, event: string, message: string, fields: Record<string, string> = {}): number {
    this.lastLogId += 1;
    const entry: LogEntry = { id: this.lastLogId, at, level, event, job: JOB, message, fields };
    this.logs.push(entry);
    if (this.logs.length > LOGS_KEPT) this.logs.shift();
    this.freshLogs.push(entry);
    return entry.id;
  }

  removeWorker(workerId: string): void {
    this.removedWorkers.push(workerId);
  }

  putCheckpoints(changed: Checkpoint[], removed: string[]): void {
    this.checkpoints.push(...changed);
    this.removedCheckpoints.push(...removed);
  }

  newestLogs(): LogEntry[] {
    return [...this.logs].reverse();
  }

  /** Everything but the workers' rows and the datasets, which their owner reads. */
  drain(): Partial<Change> {
    const drained: Partial<Change> = {
      removed_workers: this.removedWorkers,
      checkpoints: this.checkpoints,
      removed_checkpoints: this.removedCheckpoints,
      logs: this.freshLogs,
    };
    this.touched.clear();
    this.datasetsChanged = false;
    this.removedWorkers = [];
    this.checkpoints = [];
    this.removedCheckpoints = [];
    this.freshLogs = [];
    return drained;
  }
}
