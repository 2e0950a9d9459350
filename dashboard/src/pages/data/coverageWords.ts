import type { Coverage } from "../../api/types";
import { count, percent, plural } from "../../format/numbers";

export interface Verdict {
  tone: "good" | "warn" | "bad" | "quiet";
  title: string;
  text: string;
}

/** What the digest of an epoch proves, in words. */
export function coverageVerdict(coverage: Coverage): Verdict {
  const { total, covered, missing, repeated, assumed, dropped, complete, exact, workers, ended_incomplete } = coverage;
  const by = plural(workers, "worker");
  const asides = [
    assumed > 0 ? `${count(assumed)} before a resumed position are assumed` : "",
    dropped > 0 ? `${count(dropped)} were dropped with the last, incomplete batch` : "",
  ].filter(Boolean);
  const aside = asides.length ? ` Of these, ${asides.join(", and ")}.` : "";
  if (repeated > 0) {
    return {
      tone: "bad",
      title: `${plural(repeated, "sample")} read more than once`,
      text: `${count(covered)} of ${count(total)} samples were handed out by ${by}, some of them twice.${aside}`,
    };
  }
  if (complete && missing === 0 && exact) {
    return {
      tone: "good",
      title: "Every sample exactly once",
      text: `All ${count(total)} samples were handed out by ${by}; none is missing, none came twice. The merged digest of what was handed out equals that of the dataset.${aside}`,
    };
  }
  if (complete && missing === 0) {
    return {
      tone: "good",
      title: "Every sample once, by count",
      text: `The counts add up to all ${count(total)} samples over ${by}; the digest was not compared.${aside}`,
    };
  }
  if (complete || ended_incomplete) {
    return {
      tone: "bad",
      title: `${plural(missing, "sample")} missing`,
      text: `The epoch ended with ${count(covered)} of ${count(total)} samples handed out by ${by}.${aside}`,
    };
  }
  return {
    tone: "quiet",
    title: `${percent(total ? covered / total : null)} read so far`,
    text: `${count(covered)} of ${count(total)} samples handed out by ${by}, none of them twice. ${count(missing)} to come.${aside}`,
  };
}

/** Whether nothing more comes of an epoch. */
export const hasEnded = (coverage: Coverage): boolean => coverage.complete || coverage.ended_incomplete;

/** Whether shards are dealt out evenly, in words. */
export function balanceWords(shards: number[]): string {
  if (shards.length === 0) return "No rank has shards yet.";
  const least = Math.min(...shards);
  const most = Math.max(...shards);
  if (least === most) return `Every rank has ${plural(most, "shard")}.`;
  if (most - least === 1) return `Every rank has ${count(least)} or ${count(most)} shards: as even as it can be.`;
  return `Ranks have between ${count(least)} and ${count(most)} shards.`;
}
