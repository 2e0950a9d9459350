import type { Task } from "../api/types";
import { percent } from "../format/numbers";
import { duration } from "../format/time";
import { ProgressBar } from "./states";

/** How far a run is; a run that does not tell its length gets no bar. */
export function RunProgress({ task }: { task: Task }) {
  const over = task.state === "finished" || task.state === "stopped";
  if (task.progress === null) {
    return over ? null : <p className="muted">This run has not told how long it is: its end is not known.</p>;
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
