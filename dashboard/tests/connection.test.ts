import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { SourceEvent } from "../src/api/backend";
import { EventStreamParser } from "../src/api/eventStream";
import { HttpBackend } from "../src/api/httpBackend";
import { backoffMs, LiveConnection } from "../src/api/liveConnection";
import { ApiError, withQuery } from "../src/api/request";
import { emptyDashboard } from "./fixtures";

describe("event stream", () => {
  it("puts events together from pieces that end anywhere", () => {
    const text = 'id: 7\nevent: change\ndata: {"a":\ndata: 1}\n\n: a comment\n\ndata: x\r\n\r\n';
    const parser = new EventStreamParser();
    const events = [...text].flatMap((letter) => parser.push(letter));
    expect(events).toEqual([
      { id: "7", event: "change", data: '{"a":\n1}' },
      { id: null, event: "message", data: "x" },
    ]);
  });
});

describe("back-off", () => {
  it("doubles up to 15 s", () => {
    expect([1, 2, 3, 9].map((attempt) => backoffMs(attempt, () => 0.5))).toEqual([500, 1000, 2000, 15_000]);
  });
});

interface Exchange {
  url: string;
  headers: Record<string, string>;
}

/** Answers of the coordinator, in order; the last stays. */
function answerWith(...answers: ((signal: AbortSignal) => Promise<Response>)[]): Exchange[] {
  const seen: Exchange[] = [];
  vi.stubGlobal("fetch", (url: string, init: RequestInit) => {
    seen.push({ url, headers: init.headers as Record<string, string> });
    const answer = answers[Math.min(seen.length, answers.length) - 1];
    return answer?.(init.signal ?? new AbortController().signal);
  });
  return seen;
}

const refused = () => Promise.reject(new TypeError("fetch failed"));
const json =
  (body: unknown, status = 200) =>
  () =>
    Promise.resolve(new Response(JSON.stringify(body), { status }));
const stream = (text: string) => () =>
  Promise.resolve(new Response(text, { headers: { "Content-Type": "text/event-stream" } }));
const snapshotEvent = (id: number) => `id: ${id}\nevent: snapshot\ndata: ${JSON.stringify(emptyDashboard())}\n\n`;

describe("live connection", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  async function listen(ms: number): Promise<{ events: SourceEvent[]; connection: LiveConnection }> {
    const events: SourceEvent[] = [];
    const connection = new LiveConnection("http://c.test/", "job a", "live", (event) => events.push(event));
    await vi.advanceTimersByTimeAsync(ms);
    return { events, connection };
  }

  it("delivers the snapshot and the changes", async () => {
    answerWith(
      stream(`${snapshotEvent(3)}id: 4\nevent: change\ndata: {"actions":[]}\n\n`),
      () => new Promise(() => undefined),
    );
    const { events, connection } = await listen(10);
    expect(events.map((event) => event.kind).slice(0, 3)).toEqual(["connected", "snapshot", "change"]);
    connection.close();
  });

  it("comes back by itself and says where it was", async () => {
    const seen = answerWith(stream(snapshotEvent(41)), () => new Promise(() => undefined));
    const { events, connection } = await listen(2000);
    expect(events.some((event) => event.kind === "disconnected")).toBe(true);
    expect(seen[1]?.headers["Last-Event-ID"]).toBe("41");
    expect(seen[1]?.url).toBe("http://c.test/api/events?job=job+a");
    connection.close();
  });

  it("polls when streams fail but the coordinator answers", async () => {
    const seen = answerWith(refused, json({}, 200), json(emptyDashboard()));
    const { events, connection } = await listen(6000);
    expect(events.filter((event) => event.kind === "snapshot").length).toBeGreaterThan(1);
    expect(events.some((event) => event.kind === "connected" && event.via === "polling")).toBe(true);
    expect(seen.at(-1)?.url).toContain("/api/dashboard");
    connection.close();
  });

  it("says when it will try again while nobody answers", async () => {
    answerWith(refused);
    const { events, connection } = await listen(10_000);
    const losses = events.filter((event) => event.kind === "disconnected");
    expect(losses.map((event) => event.attempt)).toEqual(expect.arrayContaining([1, 2, 3]));
    connection.close();
  });

  it("streams again after an outage, rather than polling", async () => {
    answerWith(
      refused,
      refused,
      refused,
      refused,
      refused,
      stream(snapshotEvent(9)),
      () => new Promise(() => undefined),
    );
    const { events, connection } = await listen(15_000);
    const connected = events.filter((event) => event.kind === "connected");
    expect(connected.map((event) => event.via)).toEqual(["stream"]);
    connection.close();
  });

  it("is silent after it was closed", async () => {
    answerWith(refused);
    const { events, connection } = await listen(10);
    connection.close();
    const before = events.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(events.length).toBe(before);
  });
});

describe("requests", () => {
  afterEach(() => vi.unstubAllGlobals());

  it("leave out what is not given", () => {
    expect(withQuery("api/logs", { job: "a b", level: "", limit: 5, after: undefined })).toBe(
      "api/logs?job=a+b&limit=5",
    );
  });

  it("give the coordinator's own message when it refuses", async () => {
    answerWith(json({ error: { code: "no_run", message: "No run is active: start one." } }, 409));
    const asking = new HttpBackend("http://c.test/x/").act({ job: "a", kind: "stop" });
    await expect(asking).rejects.toThrow("No run is active: start one.");
    await expect(asking).rejects.toBeInstanceOf(ApiError);
  });

  it("stay below the folder that serves the page", async () => {
    const seen = answerWith(json({ resolution_seconds: 1, points: [], recoveries: [] }));
    await new HttpBackend("http://c.test/some/prefix/").history("a", 60);
    expect(seen[0]?.url).toBe("http://c.test/some/prefix/api/history?job=a&seconds=60");
  });
});
