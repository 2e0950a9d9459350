import { describe, expect, it } from "vitest";
import type { Checkpoint, LogEntry } from "../src/api/types";
import { mergeLogs, reduce } from "../src/store/reducer";
import { INITIAL_STATE, type State } from "../src/store/state";
import { changed, emptyDashboard, NO_HISTORY, START, simulated, worker } from "./fixtures";

const NOW = START * 1000;

function withSnapshot(changes = {}): State {
  return reduce(INITIAL_STATE, { kind: "snapshot", dashboard: emptyDashboard({ job: "a", ...changes }) }, NOW);
}

const entry = (id: number): LogEntry => ({
  id,
  at: START,
  level: "info",
  event: "e",
  job: "a",
  message: "",
  fields: {},
});

describe("snapshot", () => {
  it("keys workers and remembers when each was heard", () => {
    const state = withSnapshot({ workers: [worker({ heartbeat_age_seconds: 2 })] });
    expect(state.data?.workers.get("worker-0")?.heard_at_ms).toBe(NOW - 2000);
  });

  it("measures how far the coordinator's clock is from the browser's", () => {
    const state = reduce(INITIAL_STATE, { kind: "snapshot", dashboard: emptyDashboard() }, NOW - 3000);
    expect(state.clockOffset).toBe(3000);
  });

  it("keeps the charts of the same job and drops those of another", () => {
    const past = reduce(withSnapshot(), { kind: "history", history: NO_HISTORY }, NOW);
    const same = reduce(past, { kind: "snapshot", dashboard: emptyDashboard({ job: "a" }) }, NOW);
    const other = reduce(past, { kind: "snapshot", dashboard: emptyDashboard({ job: "b" }) }, NOW);
    expect(same.history).not.toBeNull();
    expect(other.history).toBeNull();
  });
});

describe("change", () => {
  it("replaces the rows that are there and keeps the others as they were", () => {
    const before = withSnapshot({ workers: [worker(), worker({ worker_id: "worker-1", rank: 1 })] });
    const after = reduce(before, changed("a", { workers: [worker({ step: 11 })] }), NOW + 500);
    expect(after.data?.workers.get("worker-0")?.step).toBe(11);
    expect(after.data?.workers.get("worker-1")).toBe(before.data?.workers.get("worker-1"));
    expect(before.data?.workers.get("worker-0")?.step).toBe(10);
  });

  it("removes workers and checkpoints", () => {
    const checkpoint = { checkpoint_id: "c1", committed_at: START } as Checkpoint;
    const before = withSnapshot({ workers: [worker()], checkpoints: [checkpoint] });
    const change = { removed_workers: ["worker-0"], removed_checkpoints: ["c1"] };
    const after = reduce(before, changed("a", change), NOW);
    expect(after.data?.workers.size).toBe(0);
    expect(after.data?.checkpoints).toEqual([]);
  });

  it("takes over a checkpoint that is told again", () => {
    const checkpoint = { checkpoint_id: "c1", committed_at: START, verified: null } as Checkpoint;
    const before = withSnapshot({ checkpoints: [checkpoint] });
    const after = reduce(before, changed("a", { checkpoints: [{ ...checkpoint, verified: true }] }), NOW);
    expect(after.data?.checkpoints).toEqual([{ ...checkpoint, verified: true }]);
  });

  it("leaves what is not in it untouched, so that nothing is drawn again", () => {
    const before = withSnapshot({ workers: [worker()] });
    const after = reduce(before, changed("a", { actions: [] }), NOW);
    expect(after.data?.workers).toBe(before.data?.workers);
    expect(after.data?.datasets).toBe(before.data?.datasets);
  });

  it("is ignored before a snapshot and for another job", () => {
    expect(reduce(INITIAL_STATE, changed("a", { workers: [worker()] }), NOW)).toBe(INITIAL_STATE);
    const before = withSnapshot();
    expect(reduce(before, changed("b", { workers: [worker()] }), NOW)).toBe(before);
  });

  it("adds a point to the charts once the last is old enough", () => {
    const started = reduce(withSnapshot(), { kind: "history", history: NO_HISTORY }, NOW);
    const one = reduce(started, changed("a", { actions: [] }), NOW);
    const soon = reduce(one, changed("a", { actions: [] }), NOW + 500);
    const later = reduce(soon, changed("a", { actions: [] }), NOW + 2000);
    expect([one, soon, later].map((state) => state.history?.points.length)).toEqual([1, 1, 2]);
  });
});

describe("curves", () => {
  it("do not go on with what was reported last", () => {
    const metrics = { ...emptyDashboard().metrics, loss: 0.5 };
    const tasks = simulated().snapshot().tasks;
    const started = reduce(withSnapshot({ metrics, tasks }), { kind: "history", history: NO_HISTORY }, NOW);
    const one = reduce(started, changed("a", { actions: [] }), NOW);
    const over = reduce(one, changed("a", { metrics: { ...metrics, loss: null } }), NOW + 2000);
    expect(over.history?.points.map((point) => point.loss)).toEqual([0.5, null]);
  });
});

describe("journal", () => {
  it("is newest first and takes repeated entries once", () => {
    expect(mergeLogs([entry(2), entry(1)], [entry(2), entry(4), entry(3)]).map((log) => log.id)).toEqual([4, 3, 2, 1]);
  });
});

describe("connection", () => {
  it("keeps the data and the moment of the loss while disconnected", () => {
    const lost = { kind: "disconnected", message: "gone", retryAt: NOW + 500, attempt: 1 } as const;
    const first = reduce(withSnapshot(), lost, NOW);
    const second = reduce(first, { ...lost, attempt: 2 }, NOW + 9000);
    expect(second.data).not.toBeNull();
    expect(second.link).toMatchObject({ status: "disconnected", since: NOW, attempt: 2 });
  });

  it("does not hide the banner while it tries again", () => {
    const lost = reduce(withSnapshot(), { kind: "disconnected", message: "", retryAt: 0, attempt: 1 }, NOW);
    expect(reduce(lost, { kind: "connecting" }, NOW).link.status).toBe("disconnected");
  });
});

describe("with a whole simulated run", () => {
  it("changes add up to what a snapshot says", () => {
    const simulation = simulated();
    let state = reduce(INITIAL_STATE, { kind: "snapshot", dashboard: simulation.snapshot() }, NOW);
    for (let tick = 0; tick < 400; tick += 1) {
      simulation.tick();
      state = reduce(state, { kind: "change", change: simulation.change() }, NOW + tick * 500);
    }
    const whole = reduce(INITIAL_STATE, { kind: "snapshot", dashboard: simulation.snapshot() }, NOW + 399 * 500);
    const shape = (s: State) =>
      [...(s.data?.workers.values() ?? [])].map((w) => [w.worker_id, w.membership, w.incarnation, w.step]).sort();
    expect(shape(state)).toEqual(shape(whole));
    expect(state.data?.checkpoints).toEqual(whole.data?.checkpoints);
    expect(state.data?.logs.slice(0, 50)).toEqual(whole.data?.logs.slice(0, 50));
  });
});
