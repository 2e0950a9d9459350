import { createContext, type ReactNode, useCallback, useContext, useEffect, useMemo, useState } from "react";
import type { RefreshMode } from "../api/backend";
import { type ByteUnits, bytes } from "../format/numbers";
import { type ClockZone, clock, dateTime } from "../format/time";

export type Theme = "system" | "light" | "dark";

export interface Settings {
  theme: Theme;
  refresh: RefreshMode;
  units: ByteUnits;
  zone: ClockZone;
}

const KEY = "strata.settings";
const DEFAULTS: Settings = { theme: "system", refresh: "live", units: "binary", zone: "local" };
const CHOICES: { [K in keyof Settings]: readonly Settings[K][] } = {
  theme: ["system", "light", "dark"],
  refresh: ["live", "poll-2", "poll-10", "paused"],
  units: ["binary", "decimal"],
  zone: ["local", "utc"],
};

/** What was stored, as far as it is still a choice. */
export function readSettings(storage: Pick<Storage, "getItem"> = window.localStorage): Settings {
  try {
    const stored = JSON.parse(storage.getItem(KEY) ?? "{}") as Partial<Settings>;
    const valid = Object.entries(stored).filter(([key, value]) =>
      (CHOICES[key as keyof Settings] as readonly string[] | undefined)?.includes(value as string),
    );
    return { ...DEFAULTS, ...Object.fromEntries(valid) };
  } catch {
    return DEFAULTS;
  }
}

interface SettingsValue extends Settings {
  resolvedTheme: "light" | "dark";
  change(changes: Partial<Settings>): void;
}

const SettingsContext = createContext<SettingsValue>({ ...DEFAULTS, resolvedTheme: "light", change: () => undefined });

export const useSettings = (): SettingsValue => useContext(SettingsContext);

/** Formats that depend on the settings. */
export function useFormat() {
  const { units, zone } = useSettings();
  return useMemo(
    () => ({
      bytes: (value: number | null | undefined) => bytes(value, units),
      clock: (at: number) => clock(at, zone),
      dateTime: (at: number) => dateTime(at, zone),
    }),
    [units, zone],
  );
}

function useSystemTheme(): "light" | "dark" {
  const query = "(prefers-color-scheme: dark)";
  const [dark, setDark] = useState(() => window.matchMedia(query).matches);
  useEffect(() => {
    const media = window.matchMedia(query);
    const follow = () => setDark(media.matches);
    media.addEventListener("change", follow);
    return () => media.removeEventListener("change", follow);
  }, []);
  return dark ? "dark" : "light";
}

export function SettingsProvider({ children }: { children: ReactNode }) {
  const [settings, setSettings] = useState(() => readSettings());
  const system = useSystemTheme();
  const resolvedTheme = settings.theme === "system" ? system : settings.theme;

  useEffect(() => {
    document.documentElement.dataset.theme = resolvedTheme;
  }, [resolvedTheme]);

  const change = useCallback((changes: Partial<Settings>) => {
    setSettings((before) => {
      const next = { ...before, ...changes };
      try {
        window.localStorage.setItem(KEY, JSON.stringify(next));
      } catch {
        // A browser that stores nothing still shows the choice until the page closes.
      }
      return next;
    });
  }, []);

  const value = useMemo(() => ({ ...settings, resolvedTheme, change }), [settings, resolvedTheme, change]);
  return <SettingsContext.Provider value={value}>{children}</SettingsContext.Provider>;
}
