import type { ReactNode } from "react";
import { Sparkline } from "../charts/Sparkline";

interface StatProps {
  label: string;
  value: ReactNode;
  unit?: string;
  note?: ReactNode;
  tone?: "good" | "warn" | "bad" | undefined;
  trend?: (number | null)[];
  href?: string;
}

export function Stat({ label, value, unit, note, tone, trend, href }: StatProps) {
  const body = (
    <>
      <span className="stat-label">{label}</span>
      <span className={`stat-value num ${tone ?? ""}`}>
        {value}
        {unit && <small>{unit}</small>}
      </span>
      {note !== undefined && <span className="stat-note num">{note}</span>}
      {trend && <Sparkline values={trend} />}
    </>
  );
  return href ? (
    <a className="stat" href={href}>
      {body}
    </a>
  ) : (
    <div className="stat">{body}</div>
  );
}

export function StatStrip({ children, label }: { children: ReactNode; label: string }) {
  return (
    <section className="stat-strip" aria-label={label}>
      {children}
    </section>
  );
}
