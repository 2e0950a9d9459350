import type { Task } from "../api/types";
import { count, percent, plural } from "../format/numbers";
import { duration } from "../format/time";
import { ProgressBar } from "./states";

/** Epochs count from 0, as in the API, the command line and `Run.epoch`; those that are over are a number of them. */
export function epochWords(task: Task): string {
  if (task.state === "finished") return task.completed_epochs ? `${plural(task.completed_epochs, "epoch")} done` : "";
  const known = task.epoch > 0 || task.epochs !== null || task.step !== null;
  if (!known) return "";
  return task.epochs === null
    ? `epoch ${count(task.epoch)}`
    : `epoch ${count(task.epoch)}, ${count(task.epochs)} in all`;
}

/** How far a run is; a run that does not tell its length gets no bar. */
export function RunProgress({ task }: { task: Task }) {
  const over = task.state === "finished" || task.state === "stopped";
  if (task.progress === null) {
    return over ? null : <p className="muted">This run has not reported its length, so its end is unknown.</p>;
  }
  const left = task.eta_seconds === null ? "time left not known" : `${duration(Math.round(task.eta_seconds))} left`;
  return (
    <div className="run-progress">
      <b className="num">{percent(task.progress)}</b>
      {task.epochs === null && task.total_steps === null && <span className="muted">of the epoch</span>}
      <ProgressBar
        fraction={task.progress}
        label={`Progress of ${task.task_id}`}
        tone={over ? "quiet" : task.state === "recovering" ? "warn" : "accent"}
      />
      <span className="num muted">{over ? task.state : left}</span>
    </div>
  );
}
