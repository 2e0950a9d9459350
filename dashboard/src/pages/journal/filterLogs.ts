import type { LogEntry, LogLevel } from "../../api/types";

/** Entries that have all the words in their message, event or fields. */
export function filterLogs(logs: LogEntry[], search: string, level: LogLevel | "", event: string): LogEntry[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0 && level === "" && event === "") return logs;
  return logs.filter((entry) => {
    if (level !== "" && entry.level !== level) return false;
    if (event !== "" && entry.event !== event) return false;
    if (words.length === 0) return true;
    const text = `${entry.message} ${entry.event} ${Object.values(entry.fields).join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}
