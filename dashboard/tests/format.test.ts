import { describe, expect, it } from "vitest";
import { bytes, compact, count, figure, percent, plural } from "../src/format/numbers";
import { ago, clock, dateTime, duration, heartbeatAge, milliseconds } from "../src/format/time";

describe("numbers", () => {
  it.each([
    [null, "—"],
    [0, "0"],
    [0.123456, "0.123"],
    [3.4219, "3.42"],
    [34.219, "34.2"],
    [3421.9, "3,422"],
    [0.00005, "5.0e-5"],
  ])("figure(%s) is %s", (value, text) => expect(figure(value)).toBe(text));

  it.each([
    [9_999, "9,999"],
    [12_480, "12.5K"],
    [3_400_000, "3.4M"],
    [2e12, "2T"],
  ])("compact(%s) is %s", (value, text) => expect(compact(value)).toBe(text));

  it("never rounds something incomplete up to 100%", () => {
    expect(percent(0.99999)).toBe("99.9%");
    expect(percent(1)).toBe("100%");
    expect(percent(null)).toBe("—");
  });

  it("writes sizes in either unit", () => {
    expect(bytes(8 * 1024 ** 3)).toBe("8.00 GiB");
    expect(bytes(8e9, "decimal")).toBe("8.00 GB");
    expect(bytes(512)).toBe("512 B");
    expect(bytes(undefined)).toBe("—");
  });

  it("counts things", () => {
    expect(count(1234567)).toBe("1,234,567");
    expect(plural(1, "worker")).toBe("1 worker");
    expect(plural(2, "entry", "entries")).toBe("2 entries");
  });
});

describe("times", () => {
  it.each([
    [0, "0 s"],
    [0.0005, "500 µs"],
    [0.042, "42 ms"],
    [3.21, "3.2 s"],
    [59.4, "59 s"],
    [60, "1 min"],
    [252, "4 min 12 s"],
    [11_100, "3 h 5 min"],
    [187_200, "2 d 4 h"],
    [null, "—"],
    [-3, "0 s"],
  ])("duration(%s) is %s", (seconds, text) => expect(duration(seconds)).toBe(text));

  it("tells ages", () => {
    expect(ago(100, 100.5)).toBe("just now");
    expect(ago(100, 112.9)).toBe("12 s ago");
    expect(ago(0, 695)).toBe("11 min ago");
    expect(heartbeatAge(0.44)).toBe("0.4 s");
    expect(heartbeatAge(75)).toBe("1 min 15 s");
    expect(milliseconds(41)).toBe("41 ms");
    expect(milliseconds(0)).toBe("0 ms");
    expect(milliseconds(null)).toBe("—");
  });

  it("writes the clock in UTC where asked", () => {
    expect(clock(0, "utc")).toBe("00:00:00");
    expect(dateTime(1_800_000_000, "utc")).toBe("2027-01-15 08:00:00");
  });
});
