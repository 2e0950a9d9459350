import { NoWorkers } from "../../app/Gate";
import { href } from "../../app/router";
import { RecoveryTimeline } from "../../charts/RecoveryTimeline";
import { LogList } from "../../components/LogList";
import { Panel } from "../../components/Panel";
import { duration } from "../../format/time";
import { useJob, useSelect, useServerNow } from "../../store/hooks";
import { CurrentRun } from "./CurrentRun";
import { Headlines } from "./Headlines";
import { Problems } from "./Problems";
import { ThroughputPanel } from "./ThroughputPanel";

export function OverviewPage() {
  const empty = useJob((data) => data.workers.size === 0 && data.tasks.length === 0 && data.checkpoints.length === 0);
  if (empty) return <NoWorkers />;
  return (
    <>
      <h1 className="visually-hidden">Overview</h1>
      <CurrentRun />
      <Problems />
      <Headlines />
      <div className="columns-2-1">
        <ThroughputPanel />
        <RecoveryPanel />
      </div>
      <NewestEntries />
    </>
  );
}

function RecoveryPanel() {
  const recoveries = useSelect((state) => state.history?.recoveries);
  const metrics = useJob((data) => data.metrics);
  const now = useServerNow();
  const note = metrics.losses_last_hour > 0 ? `${metrics.losses_last_hour} in the last hour` : undefined;
  return (
    <Panel title="Recoveries" note={note}>
      {recoveries && recoveries.length > 0 ? (
        <>
          <RecoveryTimeline recoveries={recoveries} now={now} />
          <p className="legend">
            <span>
              <i className="key bad" /> lost, not noticed yet
            </span>
            <span>
              <i className="key warn" /> noticed, until training again
            </span>
          </p>
        </>
      ) : (
        <div className="quiet-note">
          <p>No worker was lost in this period.</p>
          <p className="muted">
            When one is lost, this shows how long it took to notice and to train again
            {metrics.last_recovery_seconds === null
              ? "."
              : `. Last recovery: ${duration(metrics.last_recovery_seconds)}.`}
          </p>
        </div>
      )}
    </Panel>
  );
}

function NewestEntries() {
  const logs = useJob((data) => data.logs);
  return (
    <Panel
      title="Journal"
      flush
      end={
        <a className="link" href={href(["journal"])}>
          All entries
        </a>
      }
    >
      {logs.length === 0 ? (
        <p className="quiet-note">Nothing has happened yet.</p>
      ) : (
        <LogList entries={logs.slice(0, 8)} />
      )}
    </Panel>
  );
}
