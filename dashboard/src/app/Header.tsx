import type { RefreshMode } from "../api/backend";
import { Select } from "../components/controls";
import { Icon, Logo } from "../components/icons";
import { count } from "../format/numbers";
import { useSelect, useStore } from "../store/hooks";
import type { Link } from "../store/state";
import { href } from "./router";
import { useSettings } from "./settings";

export function Header({ onHelp }: { onHelp: () => void }) {
  const { resolvedTheme, change } = useSettings();
  const other = resolvedTheme === "dark" ? "light" : "dark";
  return (
    <header className="header">
      <a className="brand" href={href(["overview"])} aria-label="Strata, overview">
        <Logo />
        <span>Strata</span>
      </a>
      <JobSwitcher />
      <JobFacts />
      <div className="header-end">
        <LinkState />
        <button
          type="button"
          className="icon-button theme-toggle"
          aria-label={`Use the ${other} theme`}
          onClick={() => change({ theme: other })}
        >
          <Icon name={resolvedTheme === "dark" ? "sun" : "moon"} />
        </button>
        <button type="button" className="icon-button help" aria-label="Keyboard shortcuts" onClick={onHelp}>
          <Icon name="help" />
        </button>
      </div>
    </header>
  );
}

function JobSwitcher() {
  const store = useStore();
  const jobs = useSelect((state) => state.data?.jobs);
  const job = useSelect((state) => state.data?.job);
  if (!jobs || job === undefined || (jobs.length === 0 && job === "")) return null;
  const names = jobs.some((entry) => entry.job === job)
    ? jobs.map((entry) => entry.job)
    : [job, ...jobs.map((entry) => entry.job)];
  const choose = (name: string) => {
    const url = new URL(window.location.href);
    url.searchParams.set("job", name);
    window.history.replaceState(null, "", url);
    store.switchJob(name);
  };
  return (
    <div className="job-switcher">
      <Select label="Job" value={job} onChange={choose} choices={names.map((name) => [name, name || "(no name)"])} />
    </div>
  );
}

function JobFacts() {
  const facts = useSelect((state) => {
    const job = state.data?.jobs.find((entry) => entry.job === state.data?.job);
    if (!job) return "";
    const world = job.world_size ? `world size ${count(job.world_size)}` : "elastic";
    return `generation ${count(job.generation)} · ${world}`;
  });
  return <span className="header-facts num">{facts}</span>;
}

export function linkWords(link: Link, refresh: RefreshMode): { text: string; dot: string } {
  if (link.status === "connecting") return { text: "Connecting", dot: "warn" };
  if (link.status === "disconnected") return { text: "Disconnected", dot: "bad" };
  if (refresh === "paused") return { text: "Paused", dot: "" };
  if (link.via === "polling") return { text: "Polling", dot: "good" };
  return { text: "Live", dot: "good pulse" };
}

function LinkState() {
  const link = useSelect((state) => state.link);
  const { refresh } = useSettings();
  const { text, dot } = linkWords(link, refresh);
  return (
    <span className="link-state" role="status">
      <i className={`dot ${dot}`} />
      {text}
    </span>
  );
}
