import { useState } from "react";
import type { Checkpoint } from "../api/types";
import { useFormat, useSettings } from "../app/settings";
import { count } from "../format/numbers";
import { clock } from "../format/time";
import { tooltipPlace } from "./LineChart";
import { linear, timeTicks } from "./scales";
import { useSize } from "./useSize";

const HEIGHT = 132;
const BOTTOM = 24;
const SIDE = 16;

/** Checkpoints along time; as high as what was written, and marked by what happens to them next. */
export function CheckpointTimeline({ checkpoints, now }: { checkpoints: Checkpoint[]; now: number }) {
  const [ref, { width }] = useSize<HTMLDivElement>();
  const [chosen, setChosen] = useState<Checkpoint | null>(null);
  const format = useFormat();
  const { zone } = useSettings();
  const oldest = checkpoints.at(-1)?.committed_at ?? now - 60;
  const largest = Math.max(1, ...checkpoints.map((checkpoint) => checkpoint.written_bytes ?? checkpoint.size_bytes));
  const x = linear(oldest, Math.max(now, oldest + 60), SIDE, width - SIDE);
  const y = linear(0, largest, HEIGHT - BOTTOM, 14);
  return (
    <div className="chart" ref={ref} style={{ height: HEIGHT }}>
      <svg
        width={width}
        height={HEIGHT}
        role="img"
        aria-label={`${checkpoints.length} checkpoints along time`}
        onPointerLeave={() => setChosen(null)}
      >
        <line className="baseline" x1={0} x2={width} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />
        {timeTicks(oldest, now, Math.max(2, Math.floor(width / 110))).map((tick) => (
          <text key={tick} className="axis" x={x(tick)} y={HEIGHT - 6} textAnchor="middle">
            {clock(tick, zone).slice(0, 5)}
          </text>
        ))}
        {checkpoints.map((checkpoint) => {
          const at = x(checkpoint.committed_at);
          const top = y(checkpoint.written_bytes ?? checkpoint.size_bytes);
          const kind = `${checkpoint.is_full ? "full" : "part"}${checkpoint.will_be_dropped ? " dropped" : ""}`;
          return (
            <g key={checkpoint.checkpoint_id} className={`stem ${kind}`} onPointerEnter={() => setChosen(checkpoint)}>
              <rect x={at - 10} width={20} y={0} height={HEIGHT - BOTTOM} fill="transparent" />
              <rect
                className="stem-bar"
                x={at - 4}
                width={8}
                y={top}
                height={Math.max(2, HEIGHT - BOTTOM - top)}
                rx={2}
              />
            </g>
          );
        })}
      </svg>
      {chosen && (
        <div className="tooltip" style={tooltipPlace(x(chosen.committed_at), width)}>
          <time>{clock(chosen.committed_at, zone)}</time>
          <div className="tooltip-row">
            <span>step {count(chosen.step)}</span>
            <b className="num">{format.bytes(chosen.written_bytes ?? chosen.size_bytes)}</b>
          </div>
          <span className="muted">
            {chosen.is_full ? "full" : "incremental"}
            {chosen.will_be_dropped ? ", dropped next" : ""}
          </span>
        </div>
      )}
    </div>
  );
}
