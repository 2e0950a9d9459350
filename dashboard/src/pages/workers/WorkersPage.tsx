import { useDeferredValue, useMemo, useState } from "react";
import { NoWorkers } from "../../app/Gate";
import { replaceQuery } from "../../app/router";
import { Chip, SearchField, Segmented } from "../../components/controls";
import { Icon } from "../../components/icons";
import { PageHead } from "../../components/Panel";
import { count, plural } from "../../format/numbers";
import { useJob } from "../../store/hooks";
import { workerCounts, workersByRank } from "../../store/selectors";
import { filterWorkers, SHOWN, SHOWN_TITLES, type Shown } from "./filters";
import { WorkersHeatMap } from "./WorkersHeatMap";
import { WorkersTable } from "./WorkersTable";

type View = "table" | "map";

export function WorkersPage({ query }: { query: URLSearchParams }) {
  const workers = useJob(workersByRank);
  const counts = useJob(workerCounts);
  const [search, setSearch] = useState(query.get("search") ?? "");
  const shown = SHOWN.find((name) => name === query.get("show")) ?? "all";
  const view: View = query.get("view") === "map" ? "map" : "table";
  const wanted = useDeferredValue(search);
  const rows = useMemo(() => filterWorkers(workers, shown, wanted), [workers, shown, wanted]);
  const show = (next: Shown) => replaceQuery({ show: next === "all" ? "" : next });

  if (workers.length === 0) {
    return (
      <>
        <PageHead title="Workers" />
        <NoWorkers />
      </>
    );
  }
  return (
    <>
      <PageHead
        title="Workers"
        summary={`${count(counts.live)} live${counts.dead ? `, ${count(counts.dead)} dead` : ""}${counts.stragglers ? `, ${plural(counts.stragglers, "straggler")}` : ""}`}
      />
      <div className="toolbar">
        <SearchField label="Search by name, host, state" value={search} onChange={setSearch} />
        <div className="chips" role="group" aria-label="Show">
          {SHOWN.map((name) => (
            <Chip key={name} pressed={shown === name} onClick={() => show(name)}>
              {SHOWN_TITLES[name]} <span className="num">{count(counts[name])}</span>
            </Chip>
          ))}
        </div>
        <div className="end">
          <Segmented
            label="View"
            value={view}
            onChange={(next) => replaceQuery({ view: next === "map" ? "map" : "" })}
            choices={[
              {
                value: "table",
                label: (
                  <>
                    <Icon name="table" size={14} /> Table
                  </>
                ),
              },
              {
                value: "map",
                label: (
                  <>
                    <Icon name="workers" size={14} /> Heat map
                  </>
                ),
              },
            ]}
          />
        </div>
      </div>
      {view === "map" ? <WorkersHeatMap workers={rows} /> : <WorkersTable workers={rows} />}
    </>
  );
}
