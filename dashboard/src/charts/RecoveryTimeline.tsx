import type { Recovery } from "../api/types";
import { href } from "../app/router";
import { useSettings } from "../app/settings";
import { clock, duration } from "../format/time";

interface RecoveryTimelineProps {
  recoveries: Recovery[];
  now: number;
  most?: number;
}

/** Each loss as a bar: until it was noticed, and until training went on. All on one scale. */
export function RecoveryTimeline({ recoveries, now, most = 6 }: RecoveryTimelineProps) {
  const { zone } = useSettings();
  const shown = [...recoveries].sort((a, b) => b.lost_at - a.lost_at).slice(0, most);
  const longest = Math.max(1, ...shown.map((recovery) => (recovery.training_at ?? now) - recovery.lost_at));
  const share = (seconds: number) => `${(Math.max(0, seconds) / longest) * 100}%`;
  return (
    <ol className="recoveries">
      {shown.map((recovery) => {
        const end = recovery.training_at ?? now;
        const detecting = recovery.detected_at - recovery.lost_at;
        const resuming = end - recovery.detected_at;
        return (
          <li key={`${recovery.worker_id}@${recovery.lost_at}`}>
            <div className="recovery-head">
              <time className="muted">{clock(recovery.lost_at, zone)}</time>
              <a className="link truncate" href={href(["workers", recovery.worker_id])}>
                {recovery.worker_id}
              </a>
              <b className="num">{recovery.training_at === null ? "not yet" : duration(end - recovery.lost_at)}</b>
            </div>
            <div className="recovery-bar">
              <i
                className="detecting"
                style={{ width: share(detecting) }}
                title={`lost → detected: ${duration(detecting)}`}
              />
              <i
                className="resuming"
                style={{ width: share(resuming) }}
                title={`detected → training: ${duration(resuming)}`}
              />
            </div>
            <p className="visually-hidden">
              Lost, detected after {duration(detecting)}, training again after {duration(resuming)} more.
            </p>
          </li>
        );
      })}
    </ol>
  );
}
