import { act, configure, render, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { beforeAll, describe, expect, it, vi } from "vitest";
import type { Dashboard, History } from "../src/api/types";
import { App } from "../src/app/App";
import { reachable } from "../src/app/Gate";
import { PAGES } from "../src/app/pages";
import { DemoBackend } from "../src/demo/demoBackend";
import { Store } from "../src/store/store";
import { changed, emptyDashboard, NO_HISTORY, ScriptedBackend, START, simulated } from "./fixtures";

// A busy machine is late, not wrong.
configure({ asyncUtilTimeout: 20_000 });
vi.setConfig({ testTimeout: 60_000 });

let dashboard: Dashboard;
let history: History;

beforeAll(() => {
  const simulation = simulated(120);
  dashboard = simulation.snapshot();
  history = simulation.history(900);
});

/** The store draws in frames: what it is told in the first, the history that it asks for then in the second. */
async function frames(): Promise<void> {
  await act(async () => {
    for (let frame = 0; frame < 3; frame += 1) await new Promise((resolve) => requestAnimationFrame(resolve));
  });
}

async function open(data: Dashboard | null, hash = "#/overview", past: History = NO_HISTORY) {
  window.location.hash = hash;
  const backend = new ScriptedBackend(past);
  render(<App store={new Store(backend)} />);
  if (data) {
    backend.sink({ kind: "connected", via: "stream" });
    backend.sink({ kind: "snapshot", dashboard: data });
  }
  await frames();
  return backend;
}

const lost = { kind: "disconnected", message: "fetch failed", retryAt: Date.now() + 3000, attempt: 2 } as const;

describe("every page", () => {
  it.each(PAGES)("%s shows a full run", async (page) => {
    await open(dashboard, `#/${page}`, history);
    expect(screen.getByRole("main").textContent?.length).toBeGreaterThan(120);
    expect(screen.queryByText("Simulated data", { selector: "strong" })).toBeNull();
  });

  it.each(PAGES)("%s stands a coordinator that knows nothing yet", async (page) => {
    await open(emptyDashboard(), `#/${page}`);
    expect(screen.getByRole("main").textContent).not.toMatch(/NaN|undefined|Infinity|null/);
  });

  it.each(PAGES)("%s keeps its data while disconnected, and says so", async (page) => {
    const backend = await open(dashboard, `#/${page}`, history);
    backend.sink(lost);
    await frames();
    expect(screen.getByRole("alert").textContent).toContain("Connection lost");
    expect(screen.getByRole("main").className).toContain("stale");
    expect(screen.getByRole("main").textContent?.length).toBeGreaterThan(120);
  });

  it.each(PAGES)("%s is marked as simulated in the demo", async (page) => {
    window.location.hash = `#/${page}`;
    render(<App store={new Store(new DemoBackend(4, START))} />);
    await frames();
    expect(screen.getByRole("complementary", { name: "Simulated data" })).toBeTruthy();
  });
});

describe("before there is data", () => {
  it("shows that it is loading", async () => {
    await open(null);
    expect(screen.getByRole("status", { name: "Loading" })).toBeTruthy();
  });

  it("says what to run when nobody answers, and offers the demo", async () => {
    const backend = await open(null);
    backend.sink(lost);
    await frames();
    expect(screen.getByText(/strata coordinator/)).toBeTruthy();
    expect(screen.getByRole("link", { name: /simulated data/i }).getAttribute("href")).toContain("demo=1");
  });

  it("says how to start a worker when none has joined", async () => {
    await open(emptyDashboard());
    expect(screen.getByText(/COORDINATOR_URL=127.0.0.1:50051/)).toBeTruthy();
  });
});

describe("the coordinator's address", () => {
  it("is one that others can reach", () => {
    expect(reachable("0.0.0.0:50051", "head.node")).toBe("head.node:50051");
    expect(reachable("[::]:50051", "head.node")).toBe("head.node:50051");
    expect(reachable("10.0.0.4:50051", "head.node")).toBe("10.0.0.4:50051");
  });
});

describe("workers", () => {
  it("draws only the rows in sight", async () => {
    await open(dashboard, "#/workers");
    const grid = screen.getByRole("grid", { name: "Workers" });
    expect(grid.getAttribute("aria-rowcount")).toBe("121");
    expect(within(grid).getAllByRole("row").length).toBeLessThan(60);
  });

  it("sorts, searches and opens by keyboard", async () => {
    const user = userEvent.setup({ delay: null });
    await open(dashboard, "#/workers");
    await user.click(screen.getByRole("button", { name: /^Rank/ }));
    const rows = () => within(screen.getByRole("grid")).getAllByRole("row");
    expect(rows()[1]?.textContent).toContain("119");
    await user.keyboard("/");
    await user.keyboard("worker-11");
    await waitFor(() =>
      expect(
        rows()
          .slice(1)
          .every((row) => row.textContent?.includes("worker-11")),
      ).toBe(true),
    );
    rows()[1]?.focus();
    await user.keyboard("{ArrowDown}{Enter}");
    await waitFor(() => expect(window.location.hash).toMatch(/#\/workers\/worker-11/));
  });

  it("asks before a worker is drained", async () => {
    const user = userEvent.setup({ delay: null });
    const backend = await open(dashboard, "#/workers/worker-3");
    await user.click(screen.getByRole("button", { name: "Drain" }));
    const dialog = screen.getByRole("dialog", { name: "Drain worker-3?" });
    await user.type(within(dialog).getByRole("textbox"), "bad GPU");
    await user.click(within(dialog).getByRole("button", { name: "Drain the worker" }));
    expect(await screen.findByText(/will leave after/)).toBeTruthy();
    expect(backend.asked).toEqual([{ job: "pretrain-7b", kind: "drain", worker_id: "worker-3", reason: "bad GPU" }]);
  });

  it("says when a worker is not known", async () => {
    await open(dashboard, "#/workers/nobody");
    expect(screen.getByText("No worker named nobody")).toBeTruthy();
  });

  it("shows the heat map by keyboard", async () => {
    const user = userEvent.setup({ delay: null });
    await open(dashboard, "#/workers?view=map");
    screen.getByRole("application").focus();
    await user.keyboard("{ArrowRight}{ArrowRight}{Enter}");
    await waitFor(() => expect(window.location.hash).toBe("#/workers/worker-1"));
  });
});

describe("actions", () => {
  it("show the coordinator's message when it refuses", async () => {
    const user = userEvent.setup({ delay: null });
    const backend = await open(dashboard, "#/checkpoints");
    backend.refusal = new Error("No run is active: start one.");
    await user.click(screen.getByRole("button", { name: "Checkpoint now" }));
    expect(await screen.findByText("No run is active: start one.")).toBeTruthy();
  });

  it("are shown until they are done", async () => {
    const backend = await open(dashboard, "#/runs");
    const action = { action_id: "1", kind: "stop", worker_id: "", reason: "enough", requested_at: START } as const;
    backend.sink(changed(dashboard.job, { actions: [action] }));
    await frames();
    expect(screen.getByText("enough")).toBeTruthy();
    expect((screen.getByRole("button", { name: /Stopping/ }) as HTMLButtonElement).disabled).toBe(true);
  });
});

describe("problems", () => {
  it("are on the overview while there are any", async () => {
    const [train] = dashboard.datasets;
    const [newest] = dashboard.checkpoints;
    const short = { epoch: 0, total: 400, covered: 200, missing: 200, repeated: 0, assumed: 0, dropped: 0 };
    const epoch = { ...short, complete: false, exact: false, workers: 1, ended_incomplete: true };
    const datasets = train ? [{ ...train, coverage: [epoch] }] : [];
    const checkpoints = newest ? [{ ...newest, verified: false }] : [];
    await open({ ...dashboard, datasets, checkpoints });
    const panel = screen.getByRole("region", { name: "Problems" });
    expect(panel.textContent).toContain("epoch 0 of train ended with 200 of 400 samples missing");
    expect(panel.textContent).toContain("is damaged");
  });

  it("are not made up", async () => {
    const workers = dashboard.workers.filter((worker) => worker.membership === "live");
    await open({ ...dashboard, workers });
    expect(screen.queryByRole("region", { name: "Problems" })).toBeNull();
  });
});

describe("data", () => {
  it("states the proof in words", async () => {
    await open(dashboard, "#/data");
    expect(screen.getAllByText("Every sample exactly once").length).toBeGreaterThan(0);
  });
});

describe("journal", () => {
  it("pauses, counts what waits, and goes on", async () => {
    const user = userEvent.setup({ delay: null });
    const backend = await open(dashboard, "#/journal");
    await user.click(screen.getByRole("button", { name: "Pause" }));
    const entry = {
      id: 1_000_000,
      at: START,
      level: "error",
      event: "x.y",
      job: "",
      message: "a thing broke",
      fields: {},
    } as const;
    backend.sink(changed(dashboard.job, { logs: [entry] }));
    await frames();
    expect(screen.queryByText("a thing broke")).toBeNull();
    await user.click(screen.getByRole("button", { name: "Resume, 1 new" }));
    expect(screen.getByText("a thing broke")).toBeTruthy();
  });

  it("offers both exports", async () => {
    await open(dashboard, "#/journal");
    expect(screen.getByRole("link", { name: "JSONL" }).getAttribute("href")).toContain("format=jsonl");
    expect(screen.getByRole("link", { name: "CSV" }).getAttribute("href")).toContain("format=csv");
  });
});

describe("shell", () => {
  it("remembers the theme", async () => {
    const user = userEvent.setup({ delay: null });
    await open(dashboard);
    await user.click(screen.getByRole("button", { name: "Use the dark theme" }));
    expect(document.documentElement.dataset.theme).toBe("dark");
    expect(window.localStorage.getItem("strata.settings")).toContain('"theme":"dark"');
  });

  it("shows the shortcuts, and goes to pages by keys", async () => {
    const user = userEvent.setup({ delay: null });
    await open(dashboard);
    await user.keyboard("?");
    expect(screen.getByRole("dialog", { name: "Keyboard shortcuts" })).toBeTruthy();
    await user.keyboard("gj");
    await waitFor(() => expect(window.location.hash).toBe("#/journal"));
  });

  it("opens the chosen job anew", async () => {
    const user = userEvent.setup({ delay: null });
    const jobs = dashboard.jobs.flatMap((job) => [job, { ...job, job: "other" }]);
    const backend = await open({ ...dashboard, jobs });
    await user.selectOptions(screen.getByRole("combobox", { name: "Job" }), "other");
    expect(backend.opened.at(-1)?.job).toBe("other");
    window.location.hash = "#/workers";
    await screen.findByRole("main", { name: "Workers" });
    expect(screen.getByRole("status", { name: "Loading" })).toBeTruthy();
  });
});
