import { apiError } from "./request";

export interface ServerEvent {
  id: string | null;
  event: string;
  data: string;
}

/** Cuts the text of a server-sent event stream into events; pieces may end anywhere. */
export class EventStreamParser {
  private rest = "";

  push(text: string): ServerEvent[] {
    const normal = (this.rest + text).replace(/\r\n/g, "\n");
    // A lone CR at the end may be half of a CRLF.
    const whole = normal.endsWith("\r") ? normal.slice(0, -1) : normal;
    const blocks = whole.replace(/\r/g, "\n").split("\n\n");
    this.rest = (blocks.pop() ?? "") + (normal.endsWith("\r") ? "\r" : "");
    return blocks.flatMap((block) => parseBlock(block) ?? []);
  }
}

function parseBlock(block: string): ServerEvent | null {
  const parsed: ServerEvent = { id: null, event: "message", data: "" };
  const data: string[] = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") data.push(value);
    else if (field === "event") parsed.event = value;
    else if (field === "id") parsed.id = value;
  }
  if (data.length === 0) return null;
  parsed.data = data.join("\n");
  return parsed;
}

export interface StreamOptions {
  url: string;
  lastEventId: string | null;
  signal: AbortSignal;
  /** The stream is given up when nothing, not even a comment, comes for this long. */
  silenceMs: number;
  /** The same, for the time until the first byte. */
  firstByteMs: number;
  onOpen(): void;
  onEvent(event: ServerEvent): void;
}

/**
 * Reads a stream until it ends, and throws when it fails. Written on fetch rather than EventSource: only so can a
 * new connection carry Last-Event-ID, and only so are the comments seen that tell a quiet stream from a dead one.
 */
export async function readEventStream(options: StreamOptions): Promise<void> {
  const abort = new AbortController();
  const stop = () => abort.abort();
  options.signal.addEventListener("abort", stop);
  let silence = setTimeout(stop, options.firstByteMs);
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(stop, options.silenceMs);
  };
  try {
    const headers: Record<string, string> = { Accept: "text/event-stream" };
    if (options.lastEventId !== null) headers["Last-Event-ID"] = options.lastEventId;
    const response = await fetch(options.url, { headers, signal: abort.signal, cache: "no-store" });
    const type = response.headers.get("Content-Type") ?? "";
    if (!response.ok) throw apiError(await response.json().catch(() => null), response.status);
    if (!response.body || !type.includes("text/event-stream")) throw new Error("the answer is not an event stream");
    options.onOpen();
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new EventStreamParser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      for (const event of parser.push(decoder.decode(value, { stream: true }))) options.onEvent(event);
    }
  } finally {
    clearTimeout(silence);
    options.signal.removeEventListener("abort", stop);
    abort.abort();
  }
}
