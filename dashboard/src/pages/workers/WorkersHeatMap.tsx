import { useMemo, useState } from "react";
import { navigate } from "../../app/router";
import { useSettings } from "../../app/settings";
import { HeatMap } from "../../charts/HeatMap";
import { Segmented } from "../../components/controls";
import { WorkerBadge, workerState } from "../../components/states";
import { count } from "../../format/numbers";
import { duration, heartbeatAge } from "../../format/time";
import { useJob, useNow } from "../../store/hooks";
import type { WorkerRow } from "../../store/state";
import { HEAT_BY, HEAT_TITLES, type HeatBy, heatColour, readPalette, stepRange } from "./heatColours";
import { Heartbeat } from "./WorkersTable";

const HEIGHT = 460;

const rankOf = (worker: WorkerRow) => String(worker.rank);

export function WorkersHeatMap({ workers }: { workers: WorkerRow[] }) {
  const [by, setBy] = useState<HeatBy>("state");
  const [inspected, setInspected] = useState<string | null>(null);
  const { resolvedTheme } = useSettings();
  const now = useNow(by === "heartbeat" ? 500 : 1000);
  const timeoutMs = useJob((data) => data.coordinator.heartbeat_timeout_ms);
  const current = useJob((data) => (inspected === null ? undefined : data.workers.get(inspected)));
  // biome-ignore lint/correctness/useExhaustiveDependencies: the colours are other ones in the other theme
  const palette = useMemo(() => readPalette(document.documentElement), [resolvedTheme]);
  const colour = useMemo(() => {
    const scale = { ...stepRange(workers), timeoutMs, now };
    return (worker: WorkerRow) => heatColour(worker, by, palette, scale);
  }, [workers, by, palette, timeoutMs, now]);

  return (
    <section className="panel heat-panel" aria-label="Heat map of workers">
      <div className="panel-head">
        <Segmented
          small
          label="Colour by"
          value={by}
          onChange={setBy}
          choices={HEAT_BY.map((value) => ({ value, label: HEAT_TITLES[value] }))}
        />
        <div className="panel-end">
          <HeatLegend by={by} workers={workers} timeoutMs={timeoutMs} />
        </div>
      </div>
      <div className="panel-body">
        {workers.length === 0 ? (
          <p className="quiet-note">No worker matches. Clear the search, or show all.</p>
        ) : (
          <HeatMap
            label={`${count(workers.length)} workers by ${HEAT_TITLES[by].toLowerCase()}`}
            cells={workers}
            colour={colour}
            name={rankOf}
            describe={(worker) =>
              `${worker.worker_id}, rank ${worker.rank}, ${workerState(worker).text}, step ${count(worker.step)}`
            }
            onOpen={(worker) => navigate(["workers", worker.worker_id])}
            onInspect={(worker) => setInspected(worker?.worker_id ?? null)}
            height={HEIGHT}
          />
        )}
      </div>
      <footer className="heat-inspect num">
        {current ? (
          <Inspected worker={current} />
        ) : (
          <span className="muted">Point at a worker, or use the arrow keys. Click or press Enter to open it.</span>
        )}
      </footer>
    </section>
  );
}

function Inspected({ worker }: { worker: WorkerRow }) {
  return (
    <>
      <b>{worker.worker_id}</b>
      <span>rank {worker.rank}</span>
      <WorkerBadge worker={worker} />
      <span>step {count(worker.step)}</span>
      <span>
        {duration(worker.step_seconds)} per step
        {worker.slowness !== null && `, ${worker.slowness.toFixed(2)}× the median`}
      </span>
      <span>
        heard <Heartbeat worker={worker} /> ago
      </span>
      <span className="muted">{worker.hostname}</span>
    </>
  );
}

function HeatLegend({ by, workers, timeoutMs }: { by: HeatBy; workers: WorkerRow[]; timeoutMs: number }) {
  if (by === "state") {
    return (
      <p className="legend">
        <span>
          <i className="key good" /> training
        </span>
        <span>
          <i className="key accent" /> loading, saving
        </span>
        <span>
          <i className="key waiting" /> waiting, recovering
        </span>
        <span>
          <i className="key late" /> not heard
        </span>
        <span>
          <i className="key bad" /> dead
        </span>
        <span>
          <i className="key quiet" /> idle, left
        </span>
      </p>
    );
  }
  const { lowestStep, highestStep } = stepRange(workers);
  const ends: Record<Exclude<HeatBy, "state">, [string, string]> = {
    heartbeat: ["now", heartbeatAge(timeoutMs / 2000)],
    step: [count(lowestStep), count(highestStep)],
    slowness: ["as fast as the median", "1.3×"],
  };
  return (
    <p className="legend">
      <span>
        {ends[by][0]} <i className="ramp" /> {ends[by][1]}
      </span>
      {by === "heartbeat" && (
        <span>
          <i className="key warn" /> late
        </span>
      )}
      {by === "slowness" && (
        <span>
          <i className="key warn" /> straggler
        </span>
      )}
      <span>
        <i className="key bad" /> dead
      </span>
    </p>
  );
}
