import { useEffect, useState } from "react";
import { Dialog } from "../components/Dialog";
import { PAGE_ENTRIES, PAGES } from "./pages";
import { navigate } from "./router";
import { useSettings } from "./settings";

const SEQUENCE_MS = 1200;

function isTyping(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName))
  );
}

/** Keys that work everywhere; gives whether the list of them is to be shown. */
export function useShortcuts(): [boolean, (open: boolean) => void] {
  const [open, setOpen] = useState(false);
  const { resolvedTheme, change } = useSettings();
  useEffect(() => {
    let pressedG = 0;
    const onKey = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      const page = PAGES.find((name) => PAGE_ENTRIES[name].key === event.key);
      if (page && Date.now() - pressedG < SEQUENCE_MS) navigate([page]);
      else if (event.key === "?") setOpen(true);
      else if (event.key === "t") change({ theme: resolvedTheme === "dark" ? "light" : "dark" });
      else if (event.key === "/") {
        const field = document.querySelector<HTMLInputElement>("[data-search]");
        if (!field) return;
        event.preventDefault();
        field.focus();
      }
      pressedG = event.key === "g" ? Date.now() : 0;
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [resolvedTheme, change]);
  return [open, setOpen];
}

export function ShortcutList() {
  return (
    <dl className="shortcut-list">
      {PAGES.map((page) => (
        <Shortcut key={page} keys={["g", PAGE_ENTRIES[page].key]} text={PAGE_ENTRIES[page].title} />
      ))}
      <Shortcut keys={["/"]} text="Search on this page" />
      <Shortcut keys={["↑", "↓", "←", "→"]} text="Move in tables, charts and the heat map" />
      <Shortcut keys={["Enter"]} text="Open the selected worker" />
      <Shortcut keys={["t"]} text="Switch between dark and light" />
      <Shortcut keys={["?"]} text="This list" />
    </dl>
  );
}

function Shortcut({ keys, text }: { keys: string[]; text: string }) {
  return (
    <>
      <dt>
        {keys.map((key) => (
          <kbd key={key}>{key}</kbd>
        ))}
      </dt>
      <dd>{text}</dd>
    </>
  );
}

export function ShortcutsDialog({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <ShortcutList />
      <div className="dialog-actions">
        <button type="button" className="button" onClick={onClose}>
          Close
        </button>
      </div>
    </Dialog>
  );
}
