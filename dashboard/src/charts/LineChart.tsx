import { type KeyboardEvent, type PointerEvent, useMemo, useState } from "react";
import type { History } from "../api/types";
import { useSettings } from "../app/settings";
import { clock } from "../format/time";
import {
  areaPath,
  linear,
  linePath,
  nearestIndex,
  niceMax,
  niceTicks,
  tickText,
  timeLabels,
  timeTicks,
} from "./scales";
import { useSize } from "./useSize";

export interface Series {
  name: string;
  values: (number | null)[];
  tone: "accent" | "second";
  area?: boolean;
}

export interface Band {
  from: number;
  to: number;
  label: string;
}

interface LineChartProps {
  label: string;
  times: number[];
  series: Series[];
  format: (value: number | null) => string;
  /** What the values count, where the format does not say it. */
  unit?: string;
  height?: number;
  bands?: Band[];
  /** Fit the axis to the values instead of starting at 0. */
  fit?: boolean;
  /** Between measurements that are further apart than so many seconds, nothing is known, and nothing drawn. */
  gap?: number;
}

const LEAST_GAP = 10;

/** How far apart points of a history are when something is missing between them. */
export function gapOf(history: History | null): number {
  return Math.max(LEAST_GAP, 4 * (history?.resolution_seconds ?? 1));
}

const LEFT = 48;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const UNIT_ROOM = 24;

export function LineChart(props: LineChartProps) {
  const { label, times, series, format, unit, height = 220, bands = [], fit = false, gap = Infinity } = props;
  const top = unit ? TOP + UNIT_ROOM : TOP;
  const [ref, { width }] = useSize<HTMLDivElement>();
  const [cursor, setCursor] = useState<number | null>(null);
  const { zone } = useSettings();
  const plot = useMemo(
    () => layOut(times, series, width, height, top, fit, gap),
    [times, series, width, height, top, fit, gap],
  );

  const point = (event: PointerEvent<SVGSVGElement>) => {
    const bounds = event.currentTarget.getBoundingClientRect();
    setCursor(nearestIndex(plot.xs, event.clientX - bounds.left));
  };
  const step = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const next = (cursor ?? times.length - 1) + move;
    setCursor(Math.max(0, Math.min(times.length - 1, next)));
  };
  const at = cursor === null ? undefined : times[cursor];
  const reading =
    at === undefined ? "" : series.map((s) => `${s.name} ${format(s.values[cursor ?? 0] ?? null)}`).join(", ");

  return (
    <div className="chart" ref={ref} style={{ height }}>
      {times.length < 2 ? (
        <p className="chart-empty">Waiting for the first measurements.</p>
      ) : (
        <svg
          width={width}
          height={height}
          role="img"
          aria-label={at === undefined ? label : `${label}. ${clock(at, zone)}: ${reading}`}
          tabIndex={0}
          onPointerMove={point}
          onPointerLeave={() => setCursor(null)}
          onBlur={() => setCursor(null)}
          onKeyDown={step}
        >
          {plot.yTicks.map((tick) => (
            <g key={tick}>
              <line className="grid" x1={LEFT} x2={width - RIGHT} y1={plot.y(tick)} y2={plot.y(tick)} />
              <text className="axis" x={LEFT - 8} y={plot.y(tick) + 4} textAnchor="end">
                {tickText(format(tick))}
              </text>
            </g>
          ))}
          {timeLabels(plot.xTicks, zone).map((text, index) => (
            <text
              key={plot.xTicks[index]}
              className="axis"
              x={plot.x(plot.xTicks[index] ?? 0)}
              y={height - 6}
              textAnchor="middle"
            >
              {text}
            </text>
          ))}
          {unit && (
            <text className="axis" x={0} y={TOP - 2} dominantBaseline="text-before-edge">
              {unit}
            </text>
          )}
          {bands.map((band) => {
            const from = Math.max(LEFT, plot.x(band.from));
            const to = Math.min(width - RIGHT, plot.x(band.to));
            return to <= from ? null : (
              <rect
                key={band.from}
                className="band"
                x={from}
                width={Math.max(2, to - from)}
                y={top}
                height={height - top - BOTTOM}
              >
                <title>{band.label}</title>
              </rect>
            );
          })}
          {plot.lines.map((line) => (
            <g key={line.name} className={`series ${line.tone}`}>
              {line.area && <path className="area" d={line.area} />}
              <path className="line" d={line.path} />
            </g>
          ))}
          {cursor !== null && <Cursor plot={plot} index={cursor} top={top} height={height} />}
        </svg>
      )}
      {cursor !== null && at !== undefined && (
        <div className="tooltip" style={tooltipPlace(plot.xs[cursor] ?? 0, width)}>
          <time>{clock(at, zone)}</time>
          {series.map((s) => (
            <div key={s.name} className="tooltip-row">
              <i className={`key ${s.tone}`} />
              <span>{s.name}</span>
              <b className="num">{format(s.values[cursor] ?? null)}</b>
            </div>
          ))}
        </div>
      )}
    </div>
  );
}

export function tooltipPlace(x: number, width: number) {
  return x > width / 2 ? { right: width - x + 12 } : { left: x + 12 };
}

interface CursorProps {
  plot: Plot;
  index: number;
  top: number;
  height: number;
}

function Cursor({ plot, index, top, height }: CursorProps) {
  const x = plot.xs[index] ?? 0;
  return (
    <g pointerEvents="none">
      <line className="cursor" x1={x} x2={x} y1={top} y2={height - BOTTOM} />
      {plot.lines.map((line) => {
        const y = line.ys[index];
        return y === null || y === undefined ? null : (
          <circle key={line.name} className={`cursor-dot ${line.tone}`} cx={x} cy={y} r={4} />
        );
      })}
    </g>
  );
}

type Plot = ReturnType<typeof layOut>;

function layOut(
  times: number[],
  series: Series[],
  width: number,
  height: number,
  above: number,
  fit: boolean,
  gap: number,
) {
  const values = series.flatMap((s) => s.values.filter((value): value is number => value !== null));
  const high = values.reduce((most, value) => Math.max(most, value), 0);
  const low = fit ? values.reduce((least, value) => Math.min(least, value), high) : 0;
  const pad = fit ? (high - low || Math.abs(high) || 1) * 0.1 : 0;
  const bottom = fit ? low - pad : 0;
  const top = fit ? high + pad : niceMax(high);
  const from = times[0] ?? 0;
  const to = times.at(-1) ?? 1;
  const x = linear(from, to, LEFT, Math.max(LEFT + 1, width - RIGHT));
  const y = linear(bottom, top, height - BOTTOM, above);
  const xs = times.map(x);
  const apart = (index: number) => (times[index] ?? 0) - (times[index - 1] ?? 0) > gap;
  const lines = series.map((s) => {
    const ys = s.values.map((value) => (value === null ? null : y(value)));
    const area = s.area ? areaPath(xs, ys, height - BOTTOM, apart) : null;
    return { name: s.name, tone: s.tone, ys, path: linePath(xs, ys, apart), area };
  });
  return {
    x,
    y,
    xs,
    lines,
    yTicks: niceTicks(bottom, top, 4),
    xTicks: timeTicks(from, to, Math.max(2, Math.floor(width / 110))),
  };
}
