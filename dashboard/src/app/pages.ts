import type { IconName } from "../components/icons";

export const PAGES = ["overview", "workers", "data", "checkpoints", "barriers", "runs", "journal", "settings"] as const;
export type PageName = (typeof PAGES)[number];

interface PageEntry {
  title: string;
  icon: IconName;
  /** Pressed after `g`. */
  key: string;
}

export const PAGE_ENTRIES: Record<PageName, PageEntry> = {
  overview: { title: "Overview", icon: "overview", key: "o" },
  workers: { title: "Workers", icon: "workers", key: "w" },
  data: { title: "Data", icon: "data", key: "d" },
  checkpoints: { title: "Checkpoints", icon: "checkpoints", key: "c" },
  barriers: { title: "Barriers", icon: "barriers", key: "b" },
  runs: { title: "Runs", icon: "runs", key: "r" },
  journal: { title: "Journal", icon: "journal", key: "j" },
  settings: { title: "Settings", icon: "settings", key: "s" },
};

export function pageName(word: string | undefined): PageName {
  return PAGES.find((page) => page === word) ?? "overview";
}
