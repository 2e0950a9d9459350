import { type KeyboardEvent, type ReactNode, useRef } from "react";
import { Icon } from "./icons";

interface Choice<T extends string> {
  value: T;
  label: ReactNode;
}

interface SegmentedProps<T extends string> {
  label: string;
  value: T;
  choices: Choice<T>[];
  onChange: (value: T) => void;
  small?: boolean;
}

/** One of a few: a radio group, so that arrow keys choose. */
export function Segmented<T extends string>({ label, value, choices, onChange, small = false }: SegmentedProps<T>) {
  const group = useRef<HTMLDivElement>(null);
  const onKey = (event: KeyboardEvent) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const index = choices.findIndex((choice) => choice.value === value);
    const next = (index + move + choices.length) % choices.length;
    const choice = choices[next];
    if (choice) onChange(choice.value);
    group.current?.querySelectorAll("button")[next]?.focus();
  };
  return (
    <div
      ref={group}
      className={small ? "segmented small" : "segmented"}
      role="radiogroup"
      aria-label={label}
      onKeyDown={onKey}
    >
      {choices.map((choice) => (
        <button
          key={choice.value}
          type="button"
          role="radio"
          aria-checked={choice.value === value}
          tabIndex={choice.value === value ? 0 : -1}
          onClick={() => onChange(choice.value)}
        >
          {choice.label}
        </button>
      ))}
    </div>
  );
}

interface SearchFieldProps {
  label: string;
  value: string;
  onChange: (value: string) => void;
}

export function SearchField({ label, value, onChange }: SearchFieldProps) {
  return (
    <div className="search">
      <Icon name="search" />
      <input
        type="search"
        aria-label={label}
        placeholder={label}
        value={value}
        data-search
        onChange={(event) => onChange(event.target.value)}
      />
      {value === "" && <kbd aria-hidden="true">/</kbd>}
    </div>
  );
}

interface SelectProps {
  label: string;
  value: string;
  choices: [string, string][];
  onChange: (value: string) => void;
}

export function Select({ label, value, choices, onChange }: SelectProps) {
  return (
    <div className="select">
      <select aria-label={label} value={value} onChange={(event) => onChange(event.target.value)}>
        {choices.map(([choice, text]) => (
          <option key={choice} value={choice}>
            {text}
          </option>
        ))}
      </select>
      <Icon name="chevron" size={14} />
    </div>
  );
}

interface ChipProps {
  pressed: boolean;
  onClick: () => void;
  children: ReactNode;
}

export function Chip({ pressed, onClick, children }: ChipProps) {
  return (
    <button type="button" className="chip" aria-pressed={pressed} onClick={onClick}>
      {children}
    </button>
  );
}
