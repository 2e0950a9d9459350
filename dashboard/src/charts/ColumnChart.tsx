import { type KeyboardEvent, type ReactNode, useMemo, useState } from "react";
import { tooltipPlace } from "./LineChart";
import { linear, niceMax, niceTicks, tickText } from "./scales";
import { useSize } from "./useSize";

export interface Column {
  name: string;
  value: number;
  /** A marked column stands out. */
  marked?: boolean;
}

interface ColumnChartProps {
  label: string;
  columns: Column[];
  format: (value: number) => string;
  describe: (column: Column, index: number) => ReactNode;
  height?: number;
  /** Names of some columns below the axis. */
  axisEvery?: number;
  axisTitle?: string;
}

const LEFT = 48;
const RIGHT = 8;
const TOP = 10;
const WIDEST = 72;

/** Columns side by side: shards per rank (up to 1,024) or a histogram. */
export function ColumnChart({
  label,
  columns,
  format,
  describe,
  height = 200,
  axisEvery,
  axisTitle,
}: ColumnChartProps) {
  const [ref, { width }] = useSize<HTMLDivElement>();
  const [cursor, setCursor] = useState<number | null>(null);
  const bottom = axisTitle ? 40 : 24;
  const plot = useMemo(() => {
    const top = niceMax(
      columns.reduce((most, column) => Math.max(most, column.value), 0),
      4,
      1,
    );
    const room = Math.max(1, width - LEFT - RIGHT) / Math.max(1, columns.length);
    const gap = room > 6 ? Math.max(Math.min(6, room * 0.18), room - WIDEST) : room > 2 ? 0.5 : 0;
    return { top, room, gap, y: linear(0, top, height - bottom, TOP), ticks: niceTicks(0, top, 4, 1) };
  }, [columns, width, height, bottom]);

  const shape = (wanted: boolean) =>
    columns
      .map((column, index) => {
        if (Boolean(column.marked) !== wanted || column.value <= 0) return "";
        const x = LEFT + index * plot.room + plot.gap / 2;
        const y = plot.y(column.value);
        return `M${x.toFixed(2)},${height - bottom}V${y.toFixed(2)}h${(plot.room - plot.gap).toFixed(2)}V${height - bottom}Z`;
      })
      .join("");
  const step = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    setCursor(Math.max(0, Math.min(columns.length - 1, (cursor ?? -1) + move)));
  };
  const every = axisEvery ?? Math.max(1, Math.ceil(columns.length / Math.max(1, Math.floor(width / 56))));
  const chosen = cursor === null ? undefined : columns[cursor];

  return (
    <div className="chart" ref={ref} style={{ height }}>
      <svg
        width={width}
        height={height}
        role="img"
        aria-label={chosen ? `${label}. ${chosen.name}: ${format(chosen.value)}` : label}
        tabIndex={0}
        onPointerMove={(event) => {
          const x = event.clientX - event.currentTarget.getBoundingClientRect().left;
          const index = Math.floor((x - LEFT) / plot.room);
          setCursor(index >= 0 && index < columns.length ? index : null);
        }}
        onPointerLeave={() => setCursor(null)}
        onBlur={() => setCursor(null)}
        onKeyDown={step}
      >
        {plot.ticks.map((tick) => (
          <g key={tick}>
            <line className="grid" x1={LEFT} x2={width - RIGHT} y1={plot.y(tick)} y2={plot.y(tick)} />
            <text className="axis" x={LEFT - 8} y={plot.y(tick) + 4} textAnchor="end">
              {tickText(format(tick))}
            </text>
          </g>
        ))}
        <path className="columns" d={shape(false)} />
        <path className="columns marked" d={shape(true)} />
        {cursor !== null && (
          <rect
            className="column-cursor"
            x={LEFT + cursor * plot.room}
            width={plot.room}
            y={TOP}
            height={height - bottom - TOP}
          />
        )}
        {columns.map((column, index) =>
          index % every === 0 ? (
            <text
              key={column.name}
              className="axis"
              x={LEFT + (index + 0.5) * plot.room}
              y={height - bottom + 17}
              textAnchor="middle"
            >
              {tickText(column.name)}
            </text>
          ) : null,
        )}
        {axisTitle && (
          <text className="axis" x={(LEFT + width - RIGHT) / 2} y={height - 4} textAnchor="middle">
            {axisTitle}
          </text>
        )}
      </svg>
      {chosen && cursor !== null && (
        <div className="tooltip" style={tooltipPlace(LEFT + (cursor + 0.5) * plot.room, width)}>
          {describe(chosen, cursor)}
        </div>
      )}
    </div>
  );
}
