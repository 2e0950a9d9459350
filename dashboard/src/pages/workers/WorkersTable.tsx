import { useMemo } from "react";
import { navigate } from "../../app/router";
import { useFormat } from "../../app/settings";
import { DataTable, type TableColumn } from "../../components/DataTable";
import { Meter, WorkerBadge, workerState } from "../../components/states";
import { count, figure, percent } from "../../format/numbers";
import { duration, heartbeatAge } from "../../format/time";
import { useJob, useNow } from "../../store/hooks";
import type { WorkerRow } from "../../store/state";

/** The mean over a worker's GPUs, 0 to 1. */
export function gpuLoad(worker: WorkerRow): number | null {
  if (worker.gpus.length === 0) return null;
  return worker.gpus.reduce((sum, gpu) => sum + gpu.utilization_percent, 0) / worker.gpus.length / 100;
}

export function memoryShare(worker: WorkerRow): number | null {
  const { memory_used_bytes: used, memory_total_bytes: total } = worker;
  return used === null || !total ? null : used / total;
}

/** How a heartbeat's age is to be taken, given when a worker counts as dead. */
export function ageTone(ageSeconds: number, timeoutMs: number): "" | "warn" | "bad" {
  if (ageSeconds * 1000 >= timeoutMs) return "bad";
  return ageSeconds * 1000 >= timeoutMs / 2 ? "warn" : "";
}

export function Heartbeat({ worker }: { worker: WorkerRow }) {
  const now = useNow(500);
  const timeout = useJob((data) => data.coordinator.heartbeat_timeout_ms);
  const age = (now - worker.heard_at_ms) / 1000;
  const tone = worker.membership === "live" ? ageTone(age, timeout) : "";
  return <span className={`num ${tone}`}>{worker.membership === "left" ? "—" : heartbeatAge(age)}</span>;
}

/** Without what was only so while it was there. */
function present(worker: WorkerRow): WorkerRow {
  if (worker.membership === "live") return worker;
  return { ...worker, step_seconds: null, cpu_percent: null, memory_used_bytes: null, gpus: [] };
}

export function WorkersTable({ workers }: { workers: WorkerRow[] }) {
  const format = useFormat();
  const columns = useMemo<TableColumn<WorkerRow>[]>(
    () => [
      {
        key: "worker",
        title: "Worker",
        width: "minmax(84px, 1.5fr)",
        sortBy: (worker) => worker.worker_id,
        render: (worker) => (
          <span className="cell-name">
            <b className="truncate">{worker.worker_id}</b>
            <small className="truncate">{worker.hostname}</small>
          </span>
        ),
      },
      {
        key: "rank",
        title: "Rank",
        width: "56px",
        align: "end",
        from: 460,
        sortBy: (worker) => worker.rank,
        render: (worker) => <span className="num">{worker.rank}</span>,
      },
      {
        key: "state",
        title: "State",
        width: "minmax(114px, 0.9fr)",
        sortBy: (worker) => workerState(worker).text,
        render: (worker) => <WorkerBadge worker={worker} />,
      },
      {
        key: "step",
        title: "Step",
        width: "minmax(72px, 0.6fr)",
        align: "end",
        from: 620,
        sortBy: (worker) => worker.step,
        render: (worker) => <span className="num">{count(worker.step)}</span>,
      },
      {
        key: "step_seconds",
        title: "Step time",
        width: "minmax(112px, 0.9fr)",
        align: "end",
        from: 700,
        sortBy: (worker) => worker.step_seconds,
        render: (worker) => (
          <span className="num step-time">
            {worker.is_straggler && <span className="slow-mark">{figure(worker.slowness)}× slow</span>}
            {duration(worker.step_seconds)}
          </span>
        ),
      },
      {
        key: "heartbeat",
        title: "Heartbeat",
        width: "minmax(64px, 92px)",
        align: "end",
        sortBy: (worker) => -worker.heard_at_ms,
        render: (worker) => <Heartbeat worker={worker} />,
      },
      {
        key: "cpu",
        title: "CPU",
        width: "minmax(92px, 0.7fr)",
        from: 880,
        sortBy: (worker) => worker.cpu_percent,
        render: (worker) => (
          <Meter
            fraction={worker.cpu_percent === null ? null : worker.cpu_percent / 100}
            text={percent((worker.cpu_percent ?? 0) / 100, 0)}
          />
        ),
      },
      {
        key: "gpu",
        title: "GPU",
        width: "minmax(92px, 0.7fr)",
        from: 780,
        sortBy: gpuLoad,
        render: (worker) => <Meter fraction={gpuLoad(worker)} text={percent(gpuLoad(worker), 0)} />,
      },
      {
        key: "memory",
        title: "Memory",
        width: "minmax(118px, 0.8fr)",
        from: 1000,
        sortBy: memoryShare,
        render: (worker) => (
          <Meter fraction={memoryShare(worker)} text={format.bytes(worker.memory_used_bytes)} warnAt={0.95} />
        ),
      },
    ],
    [format],
  );
  const rows = useMemo(() => workers.map(present), [workers]);
  return (
    <section className="panel fill" aria-label="Workers">
      <DataTable
        label="Workers"
        columns={columns}
        rows={rows}
        rowKey={(worker) => worker.worker_id}
        initialSort={{ key: "rank", descending: false }}
        onOpen={(worker) => navigate(["workers", worker.worker_id])}
        rowClass={(worker) => (worker.membership === "live" ? "" : "faded")}
        empty="No worker matches. Clear the search, or show all."
        height="var(--table-height)"
      />
    </section>
  );
}
