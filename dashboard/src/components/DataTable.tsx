import {
  type CSSProperties,
  type KeyboardEvent,
  memo,
  type ReactNode,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "react";
import { useSize } from "../charts/useSize";

export interface TableColumn<T> {
  key: string;
  title: string;
  render: (row: T) => ReactNode;
  /** Sortable when given; null sorts last either way. */
  sortBy?: (row: T) => number | string | null;
  /** A CSS grid track. */
  width: string;
  align?: "end";
  /** Left out where the table is narrower than this. */
  from?: number;
}

export interface Sort {
  key: string;
  descending: boolean;
}

interface DataTableProps<T> {
  label: string;
  columns: TableColumn<T>[];
  rows: T[];
  rowKey: (row: T) => string;
  initialSort: Sort;
  onOpen?: (row: T) => void;
  rowClass?: (row: T) => string;
  empty: ReactNode;
  /** The greatest CSS height of the scrolling part; without it all rows are drawn. */
  height?: string;
}

const ROW_HEIGHT = 44;
const HEAD_HEIGHT = 41;
const OVERSCAN = 6;

/** Made once: comparing with a locale by name looks it up each time. */
const COLLATOR = new Intl.Collator("en", { numeric: true });

export function sortRows<T>(rows: T[], columns: TableColumn<T>[], sort: Sort): T[] {
  const by = columns.find((column) => column.key === sort.key)?.sortBy;
  if (!by) return rows;
  const sign = sort.descending ? -1 : 1;
  const keyed = rows.map((row) => ({ row, key: by(row) }));
  keyed.sort(({ key: x }, { key: y }) => {
    if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
    if (typeof x === "string" && typeof y === "string") return sign * COLLATOR.compare(x, y);
    return sign * (Number(x) - Number(y));
  });
  return keyed.map(({ row }) => row);
}

/** A sortable table that draws only the rows in sight. Arrow keys move, Enter opens. */
export function DataTable<T>(props: DataTableProps<T>) {
  const { label, columns, rows, rowKey, initialSort, onOpen, rowClass, empty, height } = props;
  const [ref, size] = useSize<HTMLDivElement>();
  const [sort, setSort] = useState(initialSort);
  const [scrollTop, setScrollTop] = useState(0);
  const [focused, setFocused] = useState(0);
  // Keys can come faster than frames: the next one goes on from here.
  const latest = useRef(0);
  // A row that is to be focused may have to be scrolled into sight and drawn first.
  const toFocus = useRef<number | null>(null);
  const body = useRef<HTMLDivElement>(null);
  const shown = useMemo(() => columns.filter((column) => size.width >= (column.from ?? 0)), [columns, size.width]);
  const sorted = useMemo(() => sortRows(rows, columns, sort), [rows, columns, sort]);
  const tracks = shown.map((column) => column.width).join(" ");
  const bounded = height !== undefined;
  const first = bounded ? Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - OVERSCAN) : 0;
  const visible = bounded ? Math.ceil(size.height / ROW_HEIGHT) + 2 * OVERSCAN : sorted.length;
  const slice = sorted.slice(first, first + visible);

  const focusRow = (wanted: number) => {
    const index = Math.max(0, Math.min(sorted.length - 1, wanted));
    latest.current = index;
    setFocused(index);
    const scroller = ref.current;
    if (scroller && bounded) {
      const top = index * ROW_HEIGHT;
      const inside = scroller.clientHeight - ROW_HEIGHT;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + ROW_HEIGHT > scroller.scrollTop + inside) scroller.scrollTop = top + ROW_HEIGHT - inside;
    }
    toFocus.current = index;
  };
  useLayoutEffect(() => {
    if (toFocus.current === null) return;
    const row = body.current?.querySelector<HTMLElement>(`[data-index="${toFocus.current}"]`);
    if (!row) return;
    toFocus.current = null;
    row.focus({ preventScroll: bounded });
  });
  const opened = useRef(onOpen);
  opened.current = onOpen;
  const [handlers] = useState<RowHandlers<T>>(() => ({
    open: (row) => opened.current?.(row),
    focus: (index) => {
      latest.current = index;
      setFocused(index);
    },
  }));
  const onKey = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(size.height / ROW_HEIGHT) - 1);
    const moves: Record<string, number> = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -sorted.length,
      End: sorted.length,
    };
    const move = moves[event.key];
    const row = sorted[latest.current];
    if (move !== undefined) {
      event.preventDefault();
      focusRow(latest.current + move);
    } else if (
      event.key === "Enter" &&
      row !== undefined &&
      event.target instanceof HTMLElement &&
      event.target.role === "row"
    ) {
      onOpen?.(row);
    }
  };

  return (
    <div className="table" role="grid" aria-label={label} aria-rowcount={sorted.length + 1} tabIndex={-1}>
      <div
        className="table-scroll"
        ref={ref}
        style={
          bounded ? { height: `min(${height}, ${HEAD_HEIGHT + Math.max(2, sorted.length) * ROW_HEIGHT}px)` } : undefined
        }
        onScroll={(event) => setScrollTop(event.currentTarget.scrollTop)}
      >
        <div className="table-head" role="row" aria-rowindex={1} style={{ gridTemplateColumns: tracks }}>
          {shown.map((column) => (
            <HeaderCell key={column.key} column={column} sort={sort} onSort={setSort} />
          ))}
        </div>
        {sorted.length === 0 && <div className="table-empty">{empty}</div>}
        <div
          ref={body}
          className="table-body"
          role="rowgroup"
          style={bounded ? { height: sorted.length * ROW_HEIGHT } : undefined}
          onKeyDown={onKey}
        >
          {slice.map((row, offset) => {
            const index = first + offset;
            return (
              <Row
                key={rowKey(row)}
                row={row}
                columns={shown as TableColumn<unknown>[]}
                index={index}
                tracks={tracks}
                placed={bounded}
                reachable={index === Math.min(focused, sorted.length - 1)}
                className={`table-row ${onOpen ? "opens" : ""} ${rowClass?.(row) ?? ""}`}
                handlers={handlers as RowHandlers<unknown>}
              />
            );
          })}
        </div>
      </div>
    </div>
  );
}

interface RowHandlers<T> {
  open: (row: T) => void;
  focus: (index: number) => void;
}

interface RowProps {
  row: unknown;
  columns: TableColumn<unknown>[];
  index: number;
  tracks: string;
  placed: boolean;
  reachable: boolean;
  className: string;
  handlers: RowHandlers<unknown>;
}

/** Drawn again only when its own data changes: scrolling through thousands costs the rows that come into sight. */
const Row = memo(function Row({ row, columns, index, tracks, placed, reachable, className, handlers }: RowProps) {
  const place: CSSProperties = placed ? { position: "absolute", top: index * ROW_HEIGHT } : {};
  return (
    <div
      role="row"
      data-index={index}
      aria-rowindex={index + 2}
      tabIndex={reachable ? 0 : -1}
      className={className}
      style={{ gridTemplateColumns: tracks, ...place }}
      onClick={() => handlers.open(row)}
      onFocus={() => handlers.focus(index)}
    >
      {columns.map((column) => (
        <div key={column.key} role="gridcell" className={`table-cell ${column.align ?? ""}`}>
          {column.render(row)}
        </div>
      ))}
    </div>
  );
});

interface HeaderCellProps<T> {
  column: TableColumn<T>;
  sort: Sort;
  onSort: (sort: Sort) => void;
}

function HeaderCell<T>({ column, sort, onSort }: HeaderCellProps<T>) {
  const active = sort.key === column.key;
  const direction = sort.descending ? "descending" : "ascending";
  return (
    <div role="columnheader" className={`table-cell ${column.align ?? ""}`} aria-sort={active ? direction : "none"}>
      {column.sortBy ? (
        <button
          type="button"
          className="sort"
          onClick={() => onSort({ key: column.key, descending: active ? !sort.descending : false })}
        >
          {column.title}
          <span aria-hidden="true" className="sort-mark">
            {active ? (sort.descending ? "↓" : "↑") : ""}
          </span>
        </button>
      ) : (
        column.title
      )}
    </div>
  );
}
