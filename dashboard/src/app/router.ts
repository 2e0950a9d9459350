import { useMemo, useSyncExternalStore } from "react";

export interface Route {
  path: string[];
  query: URLSearchParams;
}

/** "#/workers/worker-3?view=map" → where that is. */
export function parseHash(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function href(path: string[], query: Record<string, string> = {}): string {
  const params = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== ""));
  const text = params.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function navigate(path: string[], query: Record<string, string> = {}): void {
  window.location.hash = href(path, query);
}

/** Changes the query of the place we are at, without a step in the browser's history. */
export function replaceQuery(changes: Record<string, string>): void {
  const { path, query } = parseHash(window.location.hash);
  const merged = { ...Object.fromEntries(query), ...changes };
  window.history.replaceState(null, "", href(path, merged));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

function subscribe(listener: () => void): () => void {
  window.addEventListener("hashchange", listener);
  return () => window.removeEventListener("hashchange", listener);
}

export function useRoute(): Route {
  const hash = useSyncExternalStore(subscribe, () => window.location.hash);
  return useMemo(() => parseHash(hash), [hash]);
}
