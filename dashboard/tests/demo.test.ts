import { describe, expect, it } from "vitest";
import { DemoBackend } from "../src/demo/demoBackend";
import { Simulation } from "../src/demo/simulation";
import { START, simulated } from "./fixtures";

function play(simulation: Simulation, ticks: number): void {
  for (let tick = 0; tick < ticks; tick += 1) simulation.tick();
}

describe("simulation", () => {
  it("is the same for the same seed, tick for tick", () => {
    const [one, two] = [simulated(), simulated()];
    play(one, 300);
    play(two, 300);
    expect(one.change()).toEqual(two.change());
    expect(one.snapshot()).toEqual(two.snapshot());
    expect(one.history(900)).toEqual(two.history(900));
  });

  it("is another for another seed", () => {
    const other = new Simulation({ workers: 16, seed: 8, startAt: START });
    expect(other.snapshot()).not.toEqual(simulated().snapshot());
  });

  it("loses and replaces workers every minute or so, and says how long it took", () => {
    const { recoveries } = simulated().history(1200);
    expect(recoveries.length).toBeGreaterThan(8);
    for (const recovery of recoveries.slice(0, -1)) {
      expect(recovery.detected_at).toBeGreaterThan(recovery.lost_at);
      expect(recovery.training_at).toBeGreaterThan(recovery.detected_at);
    }
  });

  it("shows an open barrier with who is missing while a loss is not noticed", () => {
    const simulation = simulated();
    for (let tick = 0; tick < 400 && simulation.barriers.open.length === 0; tick += 1) simulation.tick();
    const [open] = simulation.barriers.open;
    expect(open?.missing).toHaveLength(1);
    expect(open?.arrived).toBe((open?.expected ?? 0) - 1);
  });

  it("never has two live workers of one rank", () => {
    const simulation = simulated();
    for (let tick = 0; tick < 600; tick += 1) {
      simulation.tick();
      const ranks = simulation.live().map((member) => member.row.rank);
      expect(new Set(ranks).size).toBe(ranks.length);
    }
  });

  it("carries out what is asked for", () => {
    const simulation = simulated();
    simulation.request({ job: "", kind: "drain", worker_id: "worker-1" });
    const before = simulation.shelf.committed;
    simulation.request({ job: "", kind: "checkpoint" });
    expect(simulation.actions).toHaveLength(2);
    play(simulation, 100);
    expect(simulation.actions).toHaveLength(0);
    expect(simulation.shelf.committed).toBeGreaterThan(before);
    expect(simulation.members.get("worker-1")?.row.membership).toBe("left");
  });

  it("stops at a checkpoint when asked", () => {
    const simulation = simulated();
    simulation.request({ job: "", kind: "stop" });
    for (let tick = 0; tick < 200 && simulation.phase !== "stopped"; tick += 1) simulation.tick();
    expect(simulation.snapshot().tasks[0]?.state).toBe("stopped");
  });

  it("makes a thousand workers quickly", () => {
    const began = performance.now();
    const simulation = new Simulation({ workers: 1000, seed: 7, startAt: START });
    expect(simulation.snapshot().workers).toHaveLength(1000);
    expect(performance.now() - began).toBeLessThan(8000);
  });
});

describe("demo backend", () => {
  it("says that it is simulated, and searches its journal", async () => {
    const backend = new DemoBackend(16, START);
    expect(backend.simulated).toBe(true);
    const errors = await backend.logs({ job: "", level: "error", limit: 3 });
    expect(errors).toHaveLength(3);
    expect(errors.every((entry) => entry.event === "worker.dead")).toBe(true);
    expect(decodeURIComponent(backend.exportHref({ job: "", level: "error" }, "csv"))).toContain("worker.dead");
  });
});
