import { describe, expect, it } from "vitest";
import { contrasting, fitGrid } from "../src/charts/HeatMap";
import {
  areaPath,
  linear,
  linePath,
  nearestIndex,
  niceMax,
  niceTicks,
  tickText,
  timeLabels,
  timeTicks,
} from "../src/charts/scales";
import { occupied } from "../src/pages/barriers/BarriersPage";
import { heatColour, mix, type Palette, stepRange } from "../src/pages/workers/heatColours";
import { worker } from "./fixtures";

describe("scales", () => {
  it("ticks are round and inside", () => {
    expect(niceTicks(0, 2.4, 4)).toEqual([0, 1, 2]);
    expect(niceTicks(0, 100, 4)).toEqual([0, 25, 50, 75, 100]);
    expect(niceTicks(5, 5, 4)).toEqual([5]);
  });

  it("an axis ends at a round value above all", () => {
    expect(niceMax(2.4)).toBe(3);
    expect(niceMax(80)).toBe(80);
    expect(niceMax(0)).toBe(1);
  });

  it("time ticks are full minutes", () => {
    expect(timeTicks(61, 421, 3)).toEqual([120, 240, 360]);
  });

  it("things that are counted have whole ticks", () => {
    expect(niceTicks(0, niceMax(2, 4, 1), 4, 1)).toEqual([0, 1, 2]);
    expect(niceMax(1, 4, 1)).toBe(1);
  });

  it("time ticks show what tells them apart", () => {
    const noon = 1_794_744_000;
    expect(timeLabels([noon, noon + 15], "utc")).toEqual(["12:00:00", "12:00:15"]);
    expect(timeLabels([noon, noon + 300], "utc")).toEqual(["12:00", "12:05"]);
    expect(timeLabels([noon, noon + 43_200, noon + 86_400], "utc")[1]).toBe("11-16 00:00");
  });

  it("ticks have no zeros after the point", () => {
    expect(["6.00", "1.0 s", "2.50", "10.0%", "1.05"].map(tickText)).toEqual(["6", "1 s", "2.5", "10%", "1.05"]);
  });

  it("lines leave gaps where nothing is known", () => {
    expect(linePath([0, 1, 2, 3], [5, null, 6, 7])).toBe("M0.0,5.0h0M2.0,6.0L3.0,7.0");
    expect(areaPath([0, 1, 2], [5, 6, null], 9)).toBe("M0.0,5.0L1.0,6.0L1.0,9L0.0,9Z");
  });

  it("lines do not cross a time that nobody measured", () => {
    const apart = (index: number) => index === 2;
    expect(linePath([0, 1, 8, 9], [5, 6, 7, 8], apart)).toBe("M0.0,5.0L1.0,6.0M8.0,7.0L9.0,8.0");
    expect(areaPath([0, 8], [5, 7], 9, (index) => index === 1)).toBe("M0.0,5.0L0.0,9L0.0,9ZM8.0,7.0L8.0,9L8.0,9Z");
  });

  it("finds the nearest point", () => {
    expect([-5, 0.9, 1.1, 2.6, 99].map((wanted) => nearestIndex([0, 2, 3], wanted))).toEqual([0, 0, 1, 2, 2]);
  });

  it("does not divide by zero", () => expect(linear(1, 1, 0, 10)(1)).toBe(0));
});

describe("heat map", () => {
  it.each([1, 64, 1000, 10_000])("%i cells fit into their room", (cells) => {
    const grid = fitGrid(cells, 1138, 460);
    expect(grid.columns * grid.rows).toBeGreaterThanOrEqual(cells);
    expect(grid.rows * grid.size).toBeLessThanOrEqual(460);
    expect(grid.columns * grid.wide - grid.gap).toBeLessThanOrEqual(1138.5);
  });

  const palette: Palette = {
    good: "#00ff00",
    warn: "#ffff00",
    bad: "#ff0000",
    accent: "#0000ff",
    quiet: "#888888",
    low: "#000000",
  };
  const scale = { lowestStep: 0, highestStep: 10, timeoutMs: 5000, now: 10_000 };
  const row = (changes: Parameters<typeof worker>[0], heard_at_ms = 10_000) => ({ ...worker(changes), heard_at_ms });

  it("a dead worker is red whatever is shown", () => {
    for (const by of ["state", "heartbeat", "step", "slowness"] as const) {
      expect(heatColour(row({ membership: "dead" }), by, palette, scale)).toBe("#ff0000");
    }
  });

  it("somebody who is not heard stands out among those who wait", () => {
    const waiting = heatColour(row({ state: "waiting" }), "state", palette, scale);
    const silent = heatColour(row({ state: "training" }, 7_000), "state", palette, scale);
    expect(silent).toBe(mix(palette.warn, palette.bad, 0.6));
    expect(waiting).not.toBe(silent);
  });

  it("a late heartbeat turns amber, then red", () => {
    expect(heatColour(row({}, 10_000), "heartbeat", palette, scale)).toBe("#000000");
    expect(heatColour(row({}, 7_500), "heartbeat", palette, scale)).toBe("#ffff00");
    expect(heatColour(row({}, 5_000), "heartbeat", palette, scale)).toBe("#ff0000");
  });

  it("steps go from grey to blue", () => {
    expect(heatColour(row({ step: 10 }), "step", palette, scale)).toBe("#0000ff");
    expect(heatColour(row({ step: null }), "step", palette, scale)).toBe("#888888");
    expect(stepRange([row({ step: 3 }), row({ step: 9 }), row({ step: 1, membership: "dead" })])).toEqual({
      lowestStep: 3,
      highestStep: 9,
    });
  });

  it("mixes colours and writes readably on them", () => {
    expect(mix("#000000", "#ffffff", 0.5)).toBe("#808080");
    expect(contrasting("#ffffff")).toContain("#000000");
    expect(contrasting("#000000")).toContain("#ffffff");
  });
});

describe("histogram", () => {
  it("is cut to where something is, with one empty bucket on either side", () => {
    const buckets = [0, 0, 3, 1, 0, 0].map((count, index) => ({ le_ms: index, count }));
    expect(occupied(buckets).map((bucket) => bucket.le_ms)).toEqual([1, 2, 3, 4]);
    expect(occupied([])).toEqual([]);
  });
});
