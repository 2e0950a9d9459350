import type { ReactNode } from "react";
import type { Checkpoint } from "../../api/types";
import { href } from "../../app/router";
import { Panel } from "../../components/Panel";
import { count } from "../../format/numbers";
import { useJob } from "../../store/hooks";
import { type IncompleteEpoch, incompleteEpochs, workersByRank } from "../../store/selectors";
import type { WorkerRow } from "../../store/state";

const SHOWN = 6;

/** What went wrong and stays so until somebody does something about it; nothing where all is well. */
export function Problems() {
  const epochs = useJob(incompleteEpochs);
  const dead = useJob(workersByRank).filter((worker) => worker.membership === "dead");
  const damaged = useJob((data) => data.checkpoints).filter((checkpoint) => checkpoint.verified === false);
  const lines = [...epochs.map(missingSamples), ...damaged.map(damagedCheckpoint), ...dead.map(deadWorker)];
  if (lines.length === 0) return null;
  return (
    <Panel title="Problems" note={lines.length > SHOWN ? `${count(SHOWN)} of ${count(lines.length)}` : undefined} flush>
      <ul className="problems">{lines.slice(0, SHOWN)}</ul>
    </Panel>
  );
}

function problem(key: string, where: string, name: string, rest: ReactNode): ReactNode {
  return (
    <li key={key}>
      <i className="dot bad" />
      <span className="bad">
        <a href={where}>{name}</a> {rest}
      </span>
    </li>
  );
}

function missingSamples({ datasetId, coverage }: IncompleteEpoch): ReactNode {
  const name = `epoch ${count(coverage.epoch)} of ${datasetId}`;
  const rest = `ended with ${count(coverage.missing)} of ${count(coverage.total)} samples missing`;
  return problem(`epoch ${coverage.epoch} ${datasetId}`, href(["data", datasetId]), name, rest);
}

function damagedCheckpoint(checkpoint: Checkpoint): ReactNode {
  const name = `checkpoint of step ${count(checkpoint.step)}`;
  return problem(checkpoint.checkpoint_id, href(["checkpoints"]), name, "is damaged");
}

function deadWorker(worker: WorkerRow): ReactNode {
  const rest = `is dead${worker.detail ? `: ${worker.detail}` : ""}`;
  return problem(`worker ${worker.worker_id}`, href(["workers", worker.worker_id]), worker.worker_id, rest);
}
