/** The browser's clock for everything that shows an age: all of it is drawn in one pass, not each by its own timer. */
class Ticker {
  private now = Date.now();
  private timer = 0;
  private readonly listeners = new Set<() => void>();

  constructor(private readonly everyMs: number) {}

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    if (this.listeners.size === 1) this.timer = window.setInterval(this.tick, this.everyMs);
    return () => {
      this.listeners.delete(listener);
      if (this.listeners.size === 0) window.clearInterval(this.timer);
    };
  };

  /** The time of the last tick; nobody ticks for a clock that nobody reads, so that one is set when it is old. */
  read = (): number => {
    const now = Date.now();
    if (now - this.now > 2 * this.everyMs) this.now = now;
    return this.now;
  };

  private tick = (): void => {
    this.now = Date.now();
    for (const listener of this.listeners) listener();
  };
}

const tickers = new Map<number, Ticker>();

export function ticker(everyMs: number): Ticker {
  const known = tickers.get(everyMs);
  if (known) return known;
  const made = new Ticker(everyMs);
  tickers.set(everyMs, made);
  return made;
}

/** In place of a clock's, for readers for whom time stands still. */
export const neverTicks = (): (() => void) => () => undefined;
