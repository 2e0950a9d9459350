import { Fragment } from "react";
import type { LogEntry } from "../api/types";
import { href } from "../app/router";
import { useFormat } from "../app/settings";
import { LEVEL_TONES } from "./states";

/** Journal entries, newest first. */
export function LogList({ entries, withDate = false }: { entries: LogEntry[]; withDate?: boolean }) {
  const format = useFormat();
  return (
    <ol className="log">
      {entries.map((entry) => (
        <li key={entry.id} className="log-entry">
          <time dateTime={new Date(entry.at * 1000).toISOString()} title={format.dateTime(entry.at)}>
            {withDate && !isToday(entry.at) ? format.dateTime(entry.at) : format.clock(entry.at)}
          </time>
          <i className={`dot ${LEVEL_TONES[entry.level]}`} title={entry.level} />
          <span className="visually-hidden">{entry.level}</span>
          <span className="log-event mono">{entry.event}</span>
          <span className="log-message">
            <Message entry={entry} />
          </span>
        </li>
      ))}
    </ol>
  );
}

function isToday(at: number): boolean {
  return new Date(at * 1000).toDateString() === new Date().toDateString();
}

/** The message; the worker it names leads to its page. */
function Message({ entry }: { entry: LogEntry }) {
  const worker = entry.fields.worker || entry.fields.worker_id;
  const text =
    entry.message ||
    Object.entries(entry.fields)
      .map(([name, value]) => `${name} ${value}`)
      .join(", ");
  const at = worker ? text.search(new RegExp(`(^|[^\\w-])${literal(worker)}(?![\\w-])`)) : -1;
  if (!worker || at < 0) return text;
  const start = text.indexOf(worker, at);
  return (
    <Fragment>
      {text.slice(0, start)}
      <a className="link" href={href(["workers", worker])}>
        {worker}
      </a>
      {text.slice(start + worker.length)}
    </Fragment>
  );
}

function literal(word: string): string {
  return word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
