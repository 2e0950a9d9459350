import { describe, expect, it } from "vitest";
import type { Coverage, LogEntry, Task } from "../src/api/types";
import { href, parseHash } from "../src/app/router";
import { readSettings } from "../src/app/settings";
import { epochWords } from "../src/components/RunProgress";
import { balanceWords, coverageVerdict } from "../src/pages/data/coverageWords";
import { filterLogs } from "../src/pages/journal/filterLogs";
import { filterWorkers } from "../src/pages/workers/filters";
import { ageTone } from "../src/pages/workers/WorkersTable";
import { simulated, worker } from "./fixtures";

const full: Coverage = {
  epoch: 0,
  total: 100,
  covered: 100,
  missing: 0,
  repeated: 0,
  assumed: 0,
  dropped: 0,
  complete: true,
  exact: true,
  workers: 4,
  ended_incomplete: false,
};

describe("coverage in words", () => {
  it("claims exactly once only when the digest shows it", () => {
    expect(coverageVerdict(full)).toMatchObject({ tone: "good", title: "Every sample exactly once" });
    expect(coverageVerdict({ ...full, exact: false }).title).toBe("Every sample once, by count");
  });

  it("names what is wrong", () => {
    expect(coverageVerdict({ ...full, repeated: 2 })).toMatchObject({
      tone: "bad",
      title: "2 samples read more than once",
    });
    expect(coverageVerdict({ ...full, covered: 99, missing: 1 })).toMatchObject({
      tone: "bad",
      title: "1 sample missing",
    });
  });

  it("does not call an epoch that goes on incomplete", () => {
    expect(coverageVerdict({ ...full, covered: 40, missing: 60, complete: false })).toMatchObject({
      tone: "quiet",
      title: "40% read so far",
    });
  });

  it("calls an epoch incomplete that everybody has gone on from", () => {
    const half = { ...full, covered: 40, missing: 60, complete: false, ended_incomplete: true };
    expect(coverageVerdict(half)).toMatchObject({ tone: "bad", title: "60 samples missing" });
  });

  it("says what is assumed and dropped", () => {
    expect(coverageVerdict({ ...full, assumed: 7, dropped: 3 }).text).toMatch(
      /7 before a resumed position are assumed, and 3 were dropped/,
    );
  });

  it("says how even shards are", () => {
    expect(balanceWords([3, 3])).toBe("Every rank has 3 shards.");
    expect(balanceWords([3, 4])).toContain("as even as it can be");
    expect(balanceWords([1, 4])).toBe("Ranks have between 1 and 4 shards.");
    expect(balanceWords([])).toContain("No rank");
  });
});

describe("epochs", () => {
  const task = simulated().snapshot().tasks[0] as Task;
  it("count from 0 while they go on", () => {
    expect(epochWords({ ...task, state: "running", epoch: 0, epochs: 3 })).toBe("epoch 0, 3 in all");
    expect(epochWords({ ...task, state: "running", epoch: 4, epochs: null })).toBe("epoch 4");
  });

  it("are a number of them when the run is over", () => {
    expect(epochWords({ ...task, state: "finished", epoch: 3, epochs: 3, completed_epochs: 3 })).toBe("3 epochs done");
  });

  it("are not told of somebody who never spoke of any", () => {
    expect(epochWords({ ...task, state: "idle", epoch: 0, epochs: null, step: null })).toBe("");
  });
});

describe("routes", () => {
  it("go there and back", () => {
    const route = parseHash(href(["workers", "a/b c"], { view: "map", show: "" }));
    expect(route.path).toEqual(["workers", "a/b c"]);
    expect([...route.query]).toEqual([["view", "map"]]);
  });

  it("survive a broken escape", () => expect(parseHash("#/workers/%E0%A4%A").path).toEqual(["workers", "%E0%A4%A"]));
});

describe("filters", () => {
  const rows = [
    worker(),
    worker({ worker_id: "worker-1", rank: 1, is_straggler: true }),
    worker({ worker_id: "spare-0", rank: 2, membership: "dead", hostname: "host-b" }),
  ].map((row) => ({ ...row, heard_at_ms: 0 }));

  it("find workers by state and words", () => {
    const ids = (...args: Parameters<typeof filterWorkers>) => filterWorkers(...args).map((row) => row.worker_id);
    expect(ids(rows, "stragglers", "")).toEqual(["worker-1"]);
    expect(ids(rows, "dead", "host-b SPARE")).toEqual(["spare-0"]);
    expect(ids(rows, "all", "rank:1")).toEqual(["worker-1"]);
    expect(filterWorkers(rows, "all", " ")).toBe(rows);
  });

  it("find journal entries by level, event and words in the fields", () => {
    const entry = (id: number, changes: Partial<LogEntry>): LogEntry => ({
      id,
      at: 0,
      level: "info",
      event: "a.b",
      job: "",
      message: "",
      fields: {},
      ...changes,
    });
    const logs = [entry(2, { level: "error", fields: { worker: "worker-9" } }), entry(1, { event: "c.d" })];
    expect(filterLogs(logs, "worker-9", "", "")).toEqual([logs[0]]);
    expect(filterLogs(logs, "", "info", "")).toEqual([logs[1]]);
    expect(filterLogs(logs, "", "", "c.d")).toEqual([logs[1]]);
  });

  it("take a heartbeat for late at half the timeout", () => {
    expect([1, 2.5, 5].map((age) => ageTone(age, 5000))).toEqual(["", "warn", "bad"]);
  });
});

describe("settings", () => {
  it("ignore what is broken or no choice", () => {
    const stored = (text: string | null) => readSettings({ getItem: () => text });
    expect(stored("{").theme).toBe("system");
    expect(stored('{"theme":"pink","units":"decimal"}')).toMatchObject({ theme: "system", units: "decimal" });
    expect(stored(null).refresh).toBe("live");
  });
});
