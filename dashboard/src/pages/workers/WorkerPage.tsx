import { useEffect, useState } from "react";
import { href } from "../../app/router";
import { useFormat } from "../../app/settings";
import { LineChart } from "../../charts/LineChart";
import { DrainButton } from "../../components/ActionButtons";
import { Icon } from "../../components/icons";
import { LogList } from "../../components/LogList";
import { EmptyState, Facts, PageHead, Panel } from "../../components/Panel";
import { Stat, StatStrip } from "../../components/Stat";
import { Meter, WorkerBadge } from "../../components/states";
import { count, figure, percent } from "../../format/numbers";
import { ago, duration } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";
import type { WorkerRow } from "../../store/state";
import { Heartbeat, memoryShare } from "./WorkersTable";

export function WorkerPage({ workerId }: { workerId: string }) {
  const worker = useJob((data) => data.workers.get(workerId));
  const back = (
    <a className="back" href={href(["workers"])}>
      <Icon name="back" size={14} /> Workers
    </a>
  );
  if (!worker) {
    return (
      <>
        {back}
        <EmptyState
          title={`No worker named ${workerId}`}
          actions={
            <a className="button" href={href(["journal"], { search: workerId })}>
              Search the journal
            </a>
          }
        >
          It has not joined this job, or another worker has taken its place.
        </EmptyState>
      </>
    );
  }
  return (
    <>
      {back}
      <PageHead
        title={<span className="mono-title">{worker.worker_id}</span>}
        summary={
          <span className="head-badges">
            <WorkerBadge worker={worker} />
            {worker.is_straggler && <span className="badge warn">straggler</span>}
          </span>
        }
        actions={worker.membership === "live" ? <DrainButton workerId={worker.worker_id} /> : undefined}
      />
      {worker.detail && <p className={worker.membership === "dead" ? "callout bad" : "callout"}>{worker.detail}</p>}
      <WorkerStats worker={worker} />
      <div className="columns-2-1">
        <StepTimes key={worker.worker_id} worker={worker} />
        <WorkerFacts worker={worker} />
      </div>
      <div className="columns-1-1">
        <Devices worker={worker} />
        <Reported worker={worker} />
      </div>
      <WorkerJournal workerId={worker.worker_id} />
    </>
  );
}

function WorkerStats({ worker }: { worker: WorkerRow }) {
  return (
    <StatStrip label="Worker figures">
      <Stat label="Rank" value={count(worker.rank)} note={`incarnation ${count(worker.incarnation)}`} />
      <Stat label="Step" value={count(worker.step)} note={`epoch ${count(worker.epoch)}`} />
      <Stat
        label="Step time"
        value={duration(worker.step_seconds)}
        note={stepTimeNote(worker)}
        tone={worker.is_straggler ? "warn" : undefined}
      />
      <Stat label="Last heartbeat" value={<Heartbeat worker={worker} />} note="ago" />
    </StatStrip>
  );
}

function stepTimeNote(worker: WorkerRow): string {
  if (worker.slowness !== null) return `${worker.slowness.toFixed(2)}× the median`;
  return worker.membership === "live" ? "not compared yet" : "when it was last heard";
}

const KEPT = 240;

/** What was seen since this page was opened; the coordinator keeps no step times. */
function StepTimes({ worker }: { worker: WorkerRow }) {
  const [trail, setTrail] = useState<{ times: number[]; values: (number | null)[] }>({ times: [], values: [] });
  const { heard_at_ms, step_seconds } = worker;
  useEffect(() => {
    setTrail((before) => {
      if (heard_at_ms / 1000 <= (before.times.at(-1) ?? 0) + 0.2) return before;
      return {
        times: [...before.times, heard_at_ms / 1000].slice(-KEPT),
        values: [...before.values, step_seconds].slice(-KEPT),
      };
    });
  }, [heard_at_ms, step_seconds]);
  return (
    <Panel title="Step time" note="since you opened this page">
      <LineChart
        label="Step time"
        times={trail.times}
        series={[{ name: "step time", values: trail.values, tone: "accent", area: true }]}
        format={(value) => duration(value)}
        height={200}
      />
    </Panel>
  );
}

function WorkerFacts({ worker }: { worker: WorkerRow }) {
  const now = useServerNow();
  const format = useFormat();
  return (
    <Panel title="Process">
      <Facts
        items={[
          [
            "Host",
            <span key="h" className="mono">
              {worker.hostname || "—"}
            </span>,
          ],
          [
            "Process",
            <span key="p" className="mono">
              {worker.process || "—"}
            </span>,
          ],
          [
            "Registered",
            <span key="r" title={format.dateTime(worker.registered_at)}>
              {ago(worker.registered_at, now)}
            </span>,
          ],
          ["Membership", worker.membership],
          ["GPUs", count(worker.gpu_count)],
        ]}
      />
    </Panel>
  );
}

function Devices({ worker }: { worker: WorkerRow }) {
  const format = useFormat();
  const share = memoryShare(worker);
  const nothing = worker.cpu_percent === null && share === null && worker.gpus.length === 0;
  return (
    <Panel title="Devices" note={worker.membership === "live" ? undefined : "when it was last heard"}>
      {nothing ? (
        <p className="quiet-note">This worker does not report its devices.</p>
      ) : (
        <ul className="devices">
          <li>
            <span>CPU</span>
            <Meter
              fraction={worker.cpu_percent === null ? null : worker.cpu_percent / 100}
              text={percent((worker.cpu_percent ?? 0) / 100, 0)}
            />
          </li>
          <li>
            <span>Memory</span>
            <Meter
              fraction={share}
              text={`${format.bytes(worker.memory_used_bytes)} of ${format.bytes(worker.memory_total_bytes)}`}
              warnAt={0.95}
            />
          </li>
          {worker.gpus.map((gpu, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: a GPU is its number
            <li key={index}>
              <span>GPU {index}</span>
              <Meter fraction={gpu.utilization_percent / 100} text={percent(gpu.utilization_percent / 100, 0)} />
              <Meter
                fraction={gpu.memory_total_bytes ? gpu.memory_used_bytes / gpu.memory_total_bytes : null}
                text={`${format.bytes(gpu.memory_used_bytes)} of ${format.bytes(gpu.memory_total_bytes)}`}
                warnAt={0.98}
              />
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

function Reported({ worker }: { worker: WorkerRow }) {
  const entries = Object.entries(worker.metrics);
  return (
    <Panel
      title="Reported by the training loop"
      note={worker.membership === "live" ? undefined : "when it was last heard"}
    >
      {entries.length === 0 ? (
        <p className="quiet-note">
          Nothing yet. Pass figures to <code>worker.report(step=…, loss=…)</code> and they appear here.
        </p>
      ) : (
        <Facts
          items={entries.map(([name, value]) => [
            name,
            <span key={name} className="num">
              {figure(value)}
            </span>,
          ])}
        />
      )}
    </Panel>
  );
}

function WorkerJournal({ workerId }: { workerId: string }) {
  const logs = useJob((data) => data.logs);
  const own = logs
    .filter((entry) => entry.fields.worker === workerId || entry.fields.worker_id === workerId)
    .slice(0, 20);
  return (
    <Panel
      title="Journal of this worker"
      flush
      end={
        <a className="link" href={href(["journal"], { search: workerId })}>
          Search the journal
        </a>
      }
    >
      {own.length === 0 ? <p className="quiet-note">No recent entries for this worker.</p> : <LogList entries={own} />}
    </Panel>
  );
}
