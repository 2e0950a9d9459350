import { useDeferredValue, useEffect, useMemo, useRef, useState } from "react";
import type { LogEntry, LogLevel } from "../../api/types";
import { Chip, SearchField, Select } from "../../components/controls";
import { Icon } from "../../components/icons";
import { LogList } from "../../components/LogList";
import { PageHead } from "../../components/Panel";
import { count, plural } from "../../format/numbers";
import { useJob, useStore } from "../../store/hooks";
import { logEvents } from "../../store/selectors";
import { filterLogs } from "./filterLogs";

const LEVELS: (LogLevel | "")[] = ["", "info", "warning", "error"];
const LEVEL_TITLES: Record<LogLevel | "", string> = { "": "All", info: "Info", warning: "Warnings", error: "Errors" };
const SHOWN = 300;
const OLDER = 200;

export function JournalPage({ query }: { query: URLSearchParams }) {
  const logs = useJob((data) => data.logs);
  const job = useJob((data) => data.job);
  const events = useJob(logEvents);
  const store = useStore();
  const [search, setSearch] = useState(query.get("search") ?? "");
  const [level, setLevel] = useState<LogLevel | "">(LEVELS.find((name) => name === query.get("level")) ?? "");
  const [event, setEvent] = useState(query.get("event") ?? "");
  const [pausedAt, setPausedAt] = useState<number | null>(null);
  const wanted = useDeferredValue(search);
  const older = useOlder({ job, search: wanted, level, event });

  const newestId = logs[0]?.id ?? 0;
  const waiting = pausedAt === null ? 0 : logs.filter((entry) => entry.id > pausedAt).length;
  const matching = useMemo(() => {
    const visible = pausedAt === null ? logs : logs.filter((entry) => entry.id <= pausedAt);
    const found = filterLogs(visible, wanted, level, event);
    const last = found.at(-1)?.id ?? Number.POSITIVE_INFINITY;
    return [...found, ...older.entries.filter((entry) => entry.id < last)];
  }, [logs, pausedAt, wanted, level, event, older.entries]);
  const limit = SHOWN + older.entries.length;
  const oldest = matching.at(Math.min(matching.length, limit) - 1)?.id ?? newestId + 1;
  const exported = { job, search: wanted, level, event };

  return (
    <>
      <PageHead
        title="Journal"
        summary={plural(matching.length, "entry", "entries")}
        actions={
          <>
            <a className="button" href={store.backend.exportHref(exported, "jsonl")} download="journal.jsonl">
              <Icon name="download" /> JSONL
            </a>
            <a className="button" href={store.backend.exportHref(exported, "csv")} download="journal.csv">
              <Icon name="download" /> CSV
            </a>
          </>
        }
      />
      <div className="toolbar">
        <SearchField label="Search the journal" value={search} onChange={setSearch} />
        <div className="chips" role="group" aria-label="Level">
          {LEVELS.map((name) => (
            <Chip key={name} pressed={level === name} onClick={() => setLevel(name)}>
              {name === "warning" && <i className="dot warn" />}
              {name === "error" && <i className="dot bad" />}
              {LEVEL_TITLES[name]}
            </Chip>
          ))}
        </div>
        <Select
          label="Event"
          value={event}
          onChange={setEvent}
          choices={[["", "All events"], ...events.map((name): [string, string] => [name, name])]}
        />
        <div className="end">
          <button
            type="button"
            className="button"
            aria-pressed={pausedAt !== null}
            onClick={() => setPausedAt(pausedAt === null ? newestId : null)}
          >
            <Icon name={pausedAt === null ? "pause" : "play"} />
            {pausedAt === null ? "Pause" : waiting ? `Resume, ${count(waiting)} new` : "Resume"}
          </button>
        </div>
      </div>
      <section className="panel" aria-label="Entries">
        {matching.length === 0 ? (
          <p className="quiet-note">
            {logs.length === 0
              ? "Nothing has happened yet. Entries appear as workers join, train and commit."
              : "No entry matches."}
          </p>
        ) : (
          <LogList entries={matching.slice(0, limit)} withDate />
        )}
        <footer className="log-foot">
          {older.error && <span className="bad">{older.error}</span>}
          {older.ended ? (
            <span className="muted">Start of the journal.</span>
          ) : (
            <button
              type="button"
              className="button small"
              disabled={older.loading}
              onClick={() => void older.load(oldest)}
            >
              {older.loading ? "Reading…" : "Older entries"}
            </button>
          )}
        </footer>
      </section>
    </>
  );
}

/** Entries from before those that the live tail holds, asked for page by page. */
function useOlder(query: { job: string; search: string; level: LogLevel | ""; event: string }) {
  const store = useStore();
  const [entries, setEntries] = useState<LogEntry[]>([]);
  const [state, setState] = useState({ loading: false, ended: false, error: "" });
  const key = JSON.stringify(query);
  const current = useRef(key);
  useEffect(() => {
    current.current = key;
    setEntries([]);
    setState({ loading: false, ended: false, error: "" });
  }, [key]);
  const load = async (before: number) => {
    setState({ loading: true, ended: false, error: "" });
    try {
      const page = await store.backend.logs({ ...query, before, limit: OLDER });
      if (current.current !== key) return;
      setEntries((known) => [...known, ...page.filter((entry) => entry.id < before).sort((a, b) => b.id - a.id)]);
      setState({ loading: false, ended: page.length < OLDER, error: "" });
    } catch (error) {
      setState({ loading: false, ended: false, error: error instanceof Error ? error.message : String(error) });
    }
  };
  return { entries, load, ...state };
}
