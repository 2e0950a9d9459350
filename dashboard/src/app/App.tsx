import { type CSSProperties, type ReactNode, useEffect, useRef } from "react";
import { BarriersPage } from "../pages/barriers/BarriersPage";
import { CheckpointsPage } from "../pages/checkpoints/CheckpointsPage";
import { DataPage } from "../pages/data/DataPage";
import { JournalPage } from "../pages/journal/JournalPage";
import { OverviewPage } from "../pages/overview/OverviewPage";
import { RunsPage } from "../pages/runs/RunsPage";
import { SettingsPage } from "../pages/settings/SettingsPage";
import { WorkerPage } from "../pages/workers/WorkerPage";
import { WorkersPage } from "../pages/workers/WorkersPage";
import { isStale, StoreProvider, useSelect, useStore } from "../store/hooks";
import type { Store } from "../store/store";
import { ActionsProvider } from "./actions";
import { ConnectionBanner } from "./ConnectionBanner";
import { DemoStrip } from "./DemoStrip";
import { Gate } from "./Gate";
import { Header } from "./Header";
import { Navigation, TabBar } from "./Navigation";
import { PAGE_ENTRIES, pageName } from "./pages";
import { type Route, useRoute } from "./router";
import { SettingsProvider, useSettings } from "./settings";
import { ShortcutsDialog, useShortcuts } from "./shortcuts";

export function App({ store }: { store: Store }) {
  return (
    <SettingsProvider>
      <StoreProvider value={store}>
        <ActionsProvider>
          <Shell />
        </ActionsProvider>
      </StoreProvider>
    </SettingsProvider>
  );
}

function Shell() {
  const store = useStore();
  const route = useRoute();
  const page = pageName(route.path[0]);
  const [helpOpen, setHelpOpen] = useShortcuts();
  const { refresh } = useSettings();
  const stale = useSelect(isStale);
  const main = useRef<HTMLElement>(null);
  const title = PAGE_ENTRIES[page].title;

  useEffect(() => {
    const job = new URLSearchParams(window.location.search).get("job");
    store.open(store.getState().data?.job ?? job, refresh);
    return () => store.close();
  }, [store, refresh]);

  useEffect(() => {
    document.title = `${route.path[1] ?? title} · Strata`;
    window.scrollTo(0, 0);
  }, [title, route.path]);

  const style = (store.backend.simulated ? { "--strip": "32px" } : {}) as CSSProperties;
  return (
    <div className="shell" style={style}>
      <button type="button" className="skip-link" onClick={() => main.current?.focus()}>
        Skip to content
      </button>
      {store.backend.simulated && <DemoStrip />}
      <Navigation current={page} />
      <div className="main-column">
        <Header onHelp={() => setHelpOpen(true)} />
        <ConnectionBanner />
        <main ref={main} className={stale ? "page stale" : "page"} tabIndex={-1} aria-label={title}>
          <Page route={route} />
        </main>
      </div>
      <TabBar current={page} />
      {helpOpen && <ShortcutsDialog onClose={() => setHelpOpen(false)} />}
    </div>
  );
}

function Page({ route }: { route: Route }): ReactNode {
  const [, detail] = route.path;
  switch (pageName(route.path[0])) {
    case "overview":
      return <Gate>{<OverviewPage />}</Gate>;
    case "workers":
      return (
        <Gate>{detail === undefined ? <WorkersPage query={route.query} /> : <WorkerPage workerId={detail} />}</Gate>
      );
    case "data":
      return <Gate>{<DataPage datasetId={detail} />}</Gate>;
    case "checkpoints":
      return <Gate>{<CheckpointsPage />}</Gate>;
    case "barriers":
      return <Gate>{<BarriersPage />}</Gate>;
    case "runs":
      return <Gate>{<RunsPage />}</Gate>;
    case "journal":
      return <Gate>{<JournalPage query={route.query} />}</Gate>;
    case "settings":
      return <SettingsPage />;
  }
}
