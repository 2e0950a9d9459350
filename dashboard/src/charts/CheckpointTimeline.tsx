import { type KeyboardEvent, useMemo, useState } from "react";
import type { Checkpoint } from "../api/types";
import { useFormat, useSettings } from "../app/settings";
import { type ByteUnits, byteUnit, count } from "../format/numbers";
import { clock, duration } from "../format/time";
import { tooltipPlace } from "./LineChart";
import { linear, niceMax, niceTicks, tickText, timeLabels, timeTicks } from "./scales";
import { useSize } from "./useSize";

const HEIGHT = 168;
const TOP = 10;
const BOTTOM = 24;
const LEFT = 64;
const RIGHT = 16;

/** What a checkpoint added to the store; its whole size where nobody said. */
export const storedBytes = (checkpoint: Checkpoint): number => checkpoint.written_bytes ?? checkpoint.size_bytes;

/** Checkpoints along time; as high as what was written, and marked by what happens to them next. */
export function CheckpointTimeline({ checkpoints, now }: { checkpoints: Checkpoint[]; now: number }) {
  const [ref, { width }] = useSize<HTMLDivElement>();
  const [cursor, setCursor] = useState<string | null>(null);
  const format = useFormat();
  const { zone, units } = useSettings();
  const ordered = useMemo(() => [...checkpoints].sort((a, b) => a.committed_at - b.committed_at), [checkpoints]);
  const oldest = ordered[0]?.committed_at ?? now - 60;
  const axis = useMemo(() => byteAxis(Math.max(1, ...ordered.map(storedBytes)), units), [ordered, units]);
  const x = linear(oldest, Math.max(now, oldest + 60), LEFT + 8, width - RIGHT);
  const y = linear(0, axis.top, HEIGHT - BOTTOM, TOP);
  const ticks = timeTicks(oldest, Math.max(now, oldest + 60), Math.max(2, Math.floor(width / 110)));
  const chosen = ordered.find((checkpoint) => checkpoint.checkpoint_id === cursor);

  const step = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const at = chosen ? ordered.indexOf(chosen) : ordered.length;
    const next = ordered[Math.max(0, Math.min(ordered.length - 1, at + move))];
    setCursor(next?.checkpoint_id ?? null);
  };
  const label = `${count(ordered.length)} checkpoints over time`;
  const reading = chosen ? `. Step ${count(chosen.step)}: ${format.bytes(storedBytes(chosen))}` : "";
  return (
    <div className="chart" ref={ref} style={{ height: HEIGHT }}>
      <svg
        width={width}
        height={HEIGHT}
        role="img"
        aria-label={label + reading}
        tabIndex={0}
        onPointerLeave={() => setCursor(null)}
        onBlur={() => setCursor(null)}
        onKeyDown={step}
      >
        {axis.ticks.map((tick) => (
          <g key={tick}>
            <line className="grid" x1={LEFT} x2={width} y1={y(tick)} y2={y(tick)} />
            <text className="axis" x={LEFT - 8} y={y(tick) + 4} textAnchor="end">
              {tick === 0 ? "0" : tickText(format.bytes(tick))}
            </text>
          </g>
        ))}
        {timeLabels(ticks, zone).map((text, index) => (
          <text key={ticks[index]} className="axis" x={x(ticks[index] ?? 0)} y={HEIGHT - 6} textAnchor="middle">
            {text}
          </text>
        ))}
        {ordered.map((checkpoint) => {
          const at = x(checkpoint.committed_at);
          const top = Math.min(y(storedBytes(checkpoint)), HEIGHT - BOTTOM - 2);
          const kind = `${checkpoint.is_full ? "full" : "part"}${checkpoint.will_be_dropped ? " dropped" : ""}`;
          return (
            <g
              key={checkpoint.checkpoint_id}
              className={`stem ${kind}${checkpoint === chosen ? " chosen" : ""}`}
              onPointerEnter={() => setCursor(checkpoint.checkpoint_id)}
            >
              <rect x={at - 10} width={20} y={0} height={HEIGHT - BOTTOM} fill="transparent" />
              <rect className="stem-bar" x={at - 4} width={8} y={top} height={HEIGHT - BOTTOM - top} rx={2} />
            </g>
          );
        })}
      </svg>
      {chosen && (
        <div className="tooltip" style={tooltipPlace(x(chosen.committed_at), width)}>
          <time>{clock(chosen.committed_at, zone)}</time>
          <div className="tooltip-row">
            <span>step {count(chosen.step)}</span>
            <b className="num">{format.bytes(storedBytes(chosen))}</b>
          </div>
          <span className="muted">
            {chosen.is_full ? "full" : "incremental"}
            {chosen.duration_seconds !== null && `, took ${duration(chosen.duration_seconds)}`}
            {chosen.will_be_dropped ? ", deleted next" : ""}
          </span>
        </div>
      )}
    </div>
  );
}

/** Round sizes in the unit that the largest is written in. */
function byteAxis(largest: number, units: ByteUnits) {
  const unit = byteUnit(largest, units);
  const top = niceMax(largest / unit, 3);
  return { top: top * unit, ticks: niceTicks(0, top, 3).map((tick) => tick * unit) };
}
