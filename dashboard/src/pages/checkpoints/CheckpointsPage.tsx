import { useMemo } from "react";
import type { Checkpoint } from "../../api/types";
import { useFormat } from "../../app/settings";
import { CheckpointTimeline, storedBytes } from "../../charts/CheckpointTimeline";
import { CheckpointButton } from "../../components/ActionButtons";
import { DataTable, type TableColumn } from "../../components/DataTable";
import { EmptyState, PageHead, Panel } from "../../components/Panel";
import { Stat, StatStrip } from "../../components/Stat";
import { count, percent } from "../../format/numbers";
import { ago, duration } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";

export function CheckpointsPage() {
  const checkpoints = useJob((data) => data.checkpoints);
  const now = useServerNow();
  const hasWorkers = useJob((data) => data.metrics.workers_live > 0);
  const committed = useJob((data) => data.metrics.checkpoints_committed);
  if (checkpoints.length === 0) {
    return (
      <>
        <PageHead title="Checkpoints" actions={hasWorkers ? <CheckpointButton primary /> : undefined} />
        <EmptyState
          title="No checkpoints yet"
          code={'with CheckpointManager("checkpoints") as manager:\n    manager.save(state, step=step)'}
        >
          A checkpoint appears here once the parts of all ranks are stored.
        </EmptyState>
      </>
    );
  }
  return (
    <>
      <PageHead
        title="Checkpoints"
        summary={
          committed > checkpoints.length
            ? `newest ${count(checkpoints.length)} of ${count(committed)}`
            : `${count(committed)} committed`
        }
        actions={hasWorkers ? <CheckpointButton primary /> : undefined}
      />
      <Figures checkpoints={checkpoints} now={now} />
      <Panel
        title="Timeline"
        note={checkpoints.some((checkpoint) => checkpoint.written_bytes !== null) ? "bytes written" : "size"}
        end={
          <p className="legend">
            <span>
              <i className="key accent" /> full
            </span>
            <span>
              <i className="key second" /> incremental
            </span>
            <span>
              <i className="key hatched" /> deleted next
            </span>
          </p>
        }
      >
        <CheckpointTimeline checkpoints={checkpoints} now={now} />
      </Panel>
      <CheckpointTable checkpoints={checkpoints} now={now} />
    </>
  );
}

function Figures({ checkpoints, now }: { checkpoints: Checkpoint[]; now: number }) {
  const format = useFormat();
  const last = checkpoints[0];
  const increments = checkpoints.filter((checkpoint) => !checkpoint.is_full);
  const parts = increments.filter((checkpoint) => checkpoint.written_bytes !== null);
  const written = parts.reduce((sum, checkpoint) => sum + (checkpoint.written_bytes ?? 0), 0);
  const whole = parts.reduce((sum, checkpoint) => sum + checkpoint.size_bytes, 0);
  const durations = checkpoints.flatMap((checkpoint) => checkpoint.duration_seconds ?? []).sort((a, b) => a - b);
  const dropped = checkpoints.filter((checkpoint) => checkpoint.will_be_dropped);
  const retentionKnown = checkpoints.some((checkpoint) => checkpoint.will_be_dropped !== null);
  return (
    <StatStrip label="Checkpoint figures">
      {last && (
        <Stat
          label="Last checkpoint"
          value={duration(Math.floor(Math.max(0, now - last.committed_at)))}
          unit="ago"
          note={`step ${count(last.step)}, ${format.bytes(last.size_bytes)}`}
        />
      )}
      <Stat
        label="Typical duration"
        value={duration(durations[Math.floor(durations.length / 2)])}
        note={
          durations.length
            ? `median of ${count(durations.length)}, longest ${duration(durations.at(-1))}`
            : "not measured"
        }
      />
      <Stat
        label="Saved by incremental writes"
        value={whole > 0 ? percent(1 - written / whole) : "—"}
        note={whole > 0 ? `${format.bytes(written)} written of ${format.bytes(whole)}` : noSaving(increments.length)}
      />
      <Stat
        label="Deleted next"
        value={retentionKnown ? count(dropped.length) : "—"}
        note={
          dropped.length
            ? `${format.bytes(dropped.reduce((sum, checkpoint) => sum + storedBytes(checkpoint), 0))} freed`
            : retentionKnown
              ? "retention keeps all"
              : "its writer has not said"
        }
      />
    </StatStrip>
  );
}

function noSaving(increments: number): string {
  return increments > 0 ? "writers do not report it" : "no incremental one yet";
}

function Verified({ checkpoint }: { checkpoint: Checkpoint }) {
  const format = useFormat();
  if (checkpoint.verified === null || checkpoint.verified_at === null)
    return <span className="muted">not checked</span>;
  const said = `${format.dateTime(checkpoint.verified_at)}, by ${checkpoint.verified_by || "an operator"}`;
  return (
    <span className={checkpoint.verified ? "good" : "bad"} title={said}>
      {checkpoint.verified ? "verified" : "damaged"}
    </span>
  );
}

function CheckpointTable({ checkpoints, now }: { checkpoints: Checkpoint[]; now: number }) {
  const format = useFormat();
  const all = useMemo<TableColumn<Checkpoint>[]>(
    () => [
      {
        key: "step",
        title: "Checkpoint",
        width: "minmax(100px, 1.6fr)",
        sortBy: (checkpoint) => checkpoint.step,
        render: (checkpoint) => (
          <span className="cell-name" title={checkpoint.path}>
            <b className="num">step {count(checkpoint.step)}</b>
            <small className="truncate">{checkpoint.checkpoint_id}</small>
          </span>
        ),
      },
      {
        key: "committed",
        title: "Committed",
        width: "minmax(100px, 0.8fr)",
        sortBy: (checkpoint) => checkpoint.committed_at,
        render: (checkpoint) => (
          <span className="num" title={format.dateTime(checkpoint.committed_at)}>
            {ago(checkpoint.committed_at, now)}
          </span>
        ),
      },
      {
        key: "kind",
        title: "Kind",
        width: "112px",
        from: 560,
        sortBy: (checkpoint) => (checkpoint.is_full ? "full" : "incremental"),
        render: (checkpoint) => (
          <span className={checkpoint.is_full ? "badge accent" : "badge"}>
            {checkpoint.is_full ? "full" : "incremental"}
          </span>
        ),
      },
      {
        key: "size",
        title: "Size",
        width: "minmax(72px, 92px)",
        align: "end",
        sortBy: (checkpoint) => checkpoint.size_bytes,
        render: (checkpoint) => <span className="num">{format.bytes(checkpoint.size_bytes)}</span>,
      },
      {
        key: "written",
        title: "Written",
        width: "92px",
        align: "end",
        from: 640,
        sortBy: (checkpoint) => checkpoint.written_bytes,
        render: (checkpoint) => <span className="num">{format.bytes(checkpoint.written_bytes)}</span>,
      },
      {
        key: "duration",
        title: "Took",
        width: "80px",
        align: "end",
        from: 460,
        sortBy: (checkpoint) => checkpoint.duration_seconds,
        render: (checkpoint) => <span className="num">{duration(checkpoint.duration_seconds)}</span>,
      },
      {
        key: "parts",
        title: "Parts",
        width: "68px",
        align: "end",
        from: 820,
        sortBy: (checkpoint) => checkpoint.parts,
        render: (checkpoint) => <span className="num">{count(checkpoint.parts)}</span>,
      },
      {
        key: "verified",
        title: "Contents",
        width: "104px",
        from: 720,
        sortBy: (checkpoint) => String(checkpoint.verified),
        render: (checkpoint) => <Verified checkpoint={checkpoint} />,
      },
      {
        key: "retention",
        title: "Retention",
        width: "112px",
        from: 920,
        sortBy: (checkpoint) => String(checkpoint.will_be_dropped),
        render: (checkpoint) =>
          checkpoint.will_be_dropped === null ? (
            <span className="muted">—</span>
          ) : checkpoint.will_be_dropped ? (
            <span className="warn">deleted next</span>
          ) : (
            <span className="muted">kept</span>
          ),
      },
    ],
    [format, now],
  );
  // What no writer reports would be a column of dashes.
  const hasWritten = checkpoints.some((checkpoint) => checkpoint.written_bytes !== null);
  const hasRetention = checkpoints.some((checkpoint) => checkpoint.will_be_dropped !== null);
  const columns = useMemo(
    () => all.filter(({ key }) => (key !== "written" || hasWritten) && (key !== "retention" || hasRetention)),
    [all, hasWritten, hasRetention],
  );
  return (
    <section className="panel fill" aria-label="Checkpoints">
      <DataTable
        label="Checkpoints"
        columns={columns}
        rows={checkpoints}
        rowKey={(checkpoint) => checkpoint.checkpoint_id}
        initialSort={{ key: "committed", descending: true }}
        rowClass={(checkpoint) => (checkpoint.will_be_dropped ? "faded" : "")}
        empty="None."
        height="var(--table-height)"
      />
    </section>
  );
}
