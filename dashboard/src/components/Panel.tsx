import { type ReactNode, useId } from "react";

interface PanelProps {
  title: string;
  /** A few words beside the title. */
  note?: ReactNode;
  end?: ReactNode;
  children: ReactNode;
  /** Without padding: for tables and lists that reach the edges. */
  flush?: boolean;
  className?: string;
}

export function Panel({ title, note, end, children, flush = false, className = "" }: PanelProps) {
  const id = useId();
  return (
    <section className={`panel ${className}`} aria-labelledby={id}>
      <header className="panel-head">
        <h2 id={id}>{title}</h2>
        {note !== undefined && <span className="panel-note">{note}</span>}
        {end !== undefined && <div className="panel-end">{end}</div>}
      </header>
      <div className={flush ? "panel-body flush" : "panel-body"}>{children}</div>
    </section>
  );
}

interface PageHeadProps {
  title: ReactNode;
  summary?: ReactNode;
  actions?: ReactNode;
}

export function PageHead({ title, summary, actions }: PageHeadProps) {
  return (
    <div className="page-head">
      <h1>{title}</h1>
      {summary !== undefined && <span className="summary">{summary}</span>}
      {actions !== undefined && <div className="actions">{actions}</div>}
    </div>
  );
}

/** Name and value pairs. */
export function Facts({ items }: { items: [string, ReactNode][] }) {
  return (
    <dl className="facts">
      {items.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

interface EmptyStateProps {
  title: string;
  children: ReactNode;
  /** To be typed into a shell. */
  commands?: string[];
  /** To be written into the training loop. */
  code?: string;
  actions?: ReactNode;
}

/** Says what is not there, and what to run to get it. */
export function EmptyState({ title, children, commands = [], code, actions }: EmptyStateProps) {
  return (
    <div className="empty-state">
      <h2>{title}</h2>
      <p>{children}</p>
      {commands.map((command) => (
        <pre key={command} className="command shell-command">
          <code>{command}</code>
        </pre>
      ))}
      {code && (
        <pre className="command">
          <code>{code}</code>
        </pre>
      )}
      {actions !== undefined && <div className="empty-actions">{actions}</div>}
    </div>
  );
}
