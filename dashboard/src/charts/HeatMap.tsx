import { type CSSProperties, type KeyboardEvent, useEffect, useMemo, useRef, useState } from "react";
import { useSize } from "./useSize";

interface HeatMapProps<T> {
  label: string;
  cells: T[];
  /** A CSS colour. */
  colour: (cell: T) => string;
  /** Written into cells that are large enough. */
  name: (cell: T) => string;
  describe: (cell: T) => string;
  onOpen: (cell: T) => void;
  onInspect: (cell: T | null) => void;
  height: number;
}

export interface Grid {
  columns: number;
  rows: number;
  /** Height of a cell; its width is a little more, so that the rows fill the width. */
  size: number;
  wide: number;
  gap: number;
}

const LARGEST_CELL = 64;
const LABEL_FROM = 40;

/** The largest square cells with which `count` of them fit. */
export function fitGrid(count: number, width: number, height: number): Grid {
  let size = Math.min(LARGEST_CELL, Math.max(1, Math.floor(Math.sqrt((width * height) / Math.max(1, count)))));
  while (size > 2 && Math.ceil(count / Math.max(1, Math.floor(width / size))) * size > height) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  const gap = size >= 20 ? 3 : size >= 8 ? 2 : size >= 4 ? 1 : 0;
  return { columns, rows: Math.ceil(count / columns), size, wide: (width + gap) / columns, gap };
}

/** Thousands of cells on a canvas; the pointer or the arrow keys choose one. */
export function HeatMap<T>({ label, cells, colour, name, describe, onOpen, onInspect, height }: HeatMapProps<T>) {
  const [ref, { width }] = useSize<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  const grid = useMemo(() => fitGrid(cells.length, width, height), [cells.length, width, height]);
  const drawn = Math.max(grid.size, grid.rows * grid.size);

  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context || !canvas.current) return;
    paint(context, canvas.current, { cells, colour, name, grid, width, height: drawn });
  }, [cells, colour, name, grid, width, drawn]);

  const choose = (index: number | null) => {
    const inside = index !== null && index >= 0 && index < cells.length ? index : null;
    setCursor(inside);
    onInspect(inside === null ? null : (cells[inside] ?? null));
  };
  const indexAt = (x: number, y: number) => {
    const column = Math.min(grid.columns - 1, Math.floor(x / grid.wide));
    return Math.floor(y / grid.size) * grid.columns + column;
  };
  const onKey = (event: KeyboardEvent) => {
    const moves: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -grid.columns,
      ArrowDown: grid.columns,
      Home: -cells.length,
      End: cells.length,
    };
    const chosen = cursor === null ? undefined : cells[cursor];
    if (event.key === "Enter" && chosen !== undefined) return onOpen(chosen);
    if (event.key === "Escape") return choose(null);
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(cursor === null ? 0 : Math.max(0, Math.min(cells.length - 1, cursor + move)));
  };
  const chosen = cursor === null ? undefined : cells[cursor];

  return (
    <div className="heat-map" ref={ref}>
      <canvas
        ref={canvas}
        role="application"
        tabIndex={0}
        aria-label={`${label}. Arrow keys move, Enter opens.`}
        style={{ width, height: drawn }}
        onPointerMove={(event) => choose(indexAt(event.nativeEvent.offsetX, event.nativeEvent.offsetY))}
        onPointerLeave={() => choose(null)}
        onClick={() => chosen !== undefined && onOpen(chosen)}
        onKeyDown={onKey}
      />
      {cursor !== null && <span className="heat-cursor" style={placeOf(cursor, grid)} />}
      <p className="visually-hidden" aria-live="polite">
        {chosen === undefined ? "" : describe(chosen)}
      </p>
    </div>
  );
}

interface Painting<T> {
  cells: T[];
  colour: (cell: T) => string;
  name: (cell: T) => string;
  grid: Grid;
  width: number;
  height: number;
}

/** Above the canvas, so that pointing at a cell does not draw all of them again. */
function placeOf(index: number, grid: Grid): CSSProperties {
  return {
    left: (index % grid.columns) * grid.wide,
    top: Math.floor(index / grid.columns) * grid.size,
    width: Math.max(4, grid.wide - grid.gap),
    height: Math.max(4, grid.size - grid.gap),
    borderRadius: cornerOf(grid),
  };
}

const cornerOf = (grid: Grid) => (grid.size >= 16 ? 4 : grid.size >= 8 ? 2 : 0);

function paint<T>(context: CanvasRenderingContext2D, canvas: HTMLCanvasElement, painting: Painting<T>): void {
  const { cells, colour, name, grid, width, height } = painting;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const inner = grid.size - grid.gap;
  const wide = grid.wide - grid.gap;
  context.font = `540 12px ${getComputedStyle(canvas).fontFamily}`;
  const radius = cornerOf(grid);
  cells.forEach((cell, index) => {
    const x = (index % grid.columns) * grid.wide;
    const y = Math.floor(index / grid.columns) * grid.size;
    context.fillStyle = colour(cell);
    if (radius === 0) context.fillRect(x, y, Math.max(1, wide), inner);
    else {
      context.beginPath();
      context.roundRect(x, y, wide, inner, radius);
      context.fill();
    }
    if (grid.size >= LABEL_FROM) {
      context.fillStyle = contrasting(colour(cell));
      context.fillText(name(cell), x + 8, y + 18);
    }
  });
}

/** Black or white, whichever is easier to read on a #rrggbb colour. */
export function contrasting(colour: string): string {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5].map(
    (at) => (Number.parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000cc" : "#ffffffe6";
}
