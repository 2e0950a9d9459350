/** A small seeded generator (mulberry32): the same seed gives the same run in every browser. */
export class Random {
  private state: number;

  constructor(seed: number) {
    this.state = seed >>> 0;
  }

  /** 0 ≤ x < 1 */
  next(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let t = this.state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  }

  between(low: number, high: number): number {
    return low + (high - low) * this.next();
  }

  integer(below: number): number {
    return Math.floor(this.next() * below);
  }

  /** About normal around 0, with spread 1. */
  normal(): number {
    return (this.next() + this.next() + this.next() + this.next() - 2) * 1.73;
  }

  /** A choice that depends on the word alone. */
  static hash(word: string): number {
    let hash = 2166136261;
    for (let i = 0; i < word.length; i += 1) hash = Math.imul(hash ^ word.charCodeAt(i), 16777619);
    return hash >>> 0;
  }
}
