import { useState } from "react";
import { Dialog } from "../components/Dialog";
import { Icon, Logo } from "../components/icons";
import { count } from "../format/numbers";
import { useSelect } from "../store/hooks";
import { incompleteEpochs, workerCounts } from "../store/selectors";
import type { State } from "../store/state";
import { PAGE_ENTRIES, PAGES, type PageName } from "./pages";
import { href } from "./router";

/** What the menu says beside a page, as "text|tone" so that it is compared by value. */
function hint(state: State, page: PageName): string {
  const { data } = state;
  if (!data) return "";
  switch (page) {
    case "workers": {
      const counts = workerCounts(data);
      return counts.all === 0 ? "" : `${count(counts.live)}|${counts.dead > 0 ? "bad" : ""}`;
    }
    case "checkpoints":
      return data.metrics.checkpoints_committed ? `${count(data.metrics.checkpoints_committed)}|` : "";
    case "barriers":
      return data.barriers.open.length ? `${count(data.barriers.open.length)} open|warn` : "";
    case "runs":
      return data.actions.length ? `${count(data.actions.length)} pending|warn` : "";
    case "data": {
      const lacking = incompleteEpochs(data).length;
      if (lacking) return `${count(lacking)} incomplete|bad`;
      return data.datasets.length ? `${count(data.datasets.length)}|` : "";
    }
    default:
      return "";
  }
}

function NavItem({ page, current }: { page: PageName; current: PageName }) {
  const [text, tone] = useSelect((state) => hint(state, page)).split("|");
  const { title, icon } = PAGE_ENTRIES[page];
  return (
    <a className="nav-item" href={href([page])} aria-current={page === current ? "page" : undefined}>
      <Icon name={icon} />
      {title}
      {text && <span className={`nav-count ${tone}`}>{text}</span>}
    </a>
  );
}

export function Navigation({ current }: { current: PageName }) {
  const version = useSelect((state) => state.data?.coordinator.version ?? "");
  return (
    <nav className="nav" aria-label="Pages">
      <a className="brand" href={href(["overview"])}>
        <Logo />
        <span>Strata</span>
      </a>
      <div className="nav-list">
        {PAGES.map((page) => (
          <NavItem key={page} page={page} current={current} />
        ))}
      </div>
      {version && <p className="nav-foot">Coordinator {version}</p>}
    </nav>
  );
}

const TABS: PageName[] = ["overview", "workers", "checkpoints", "journal"];

/** The bar at the bottom of a phone. */
export function TabBar({ current }: { current: PageName }) {
  const [open, setOpen] = useState(false);
  const inTabs = TABS.includes(current);
  return (
    <nav className="tab-bar" aria-label="Pages, short">
      {TABS.map((page) => (
        <a key={page} className="tab" href={href([page])} aria-current={page === current ? "page" : undefined}>
          <Icon name={PAGE_ENTRIES[page].icon} size={20} />
          {PAGE_ENTRIES[page].title}
        </a>
      ))}
      <button
        type="button"
        className="tab"
        aria-expanded={open}
        aria-current={inTabs ? undefined : "page"}
        onClick={() => setOpen(true)}
      >
        <Icon name="more" size={20} />
        More
      </button>
      {open && (
        <Dialog title="Pages" onClose={() => setOpen(false)}>
          {/* biome-ignore lint/a11y/noStaticElementInteractions: it only closes the menu after a choice */}
          <div className="nav-list" onClick={() => setOpen(false)}>
            {PAGES.filter((page) => !TABS.includes(page)).map((page) => (
              <NavItem key={page} page={page} current={current} />
            ))}
          </div>
        </Dialog>
      )}
    </nav>
  );
}
