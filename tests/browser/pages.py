"""The dashboard in a real browser, as tests look at it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Page

from tests.support.http_api import PROMPT, SLACK

PAGES = ("overview", "workers", "data", "checkpoints", "barriers", "runs", "journal", "settings")
AXE = Path(__file__).parents[2] / "dashboard/node_modules/axe-core/axe.min.js"

# The page's policy forbids making code from text, so the condition is part of what is sent.
_SEEN = """(milliseconds) => new Promise((resolve) => {
  const end = performance.now() + milliseconds;
  const look = () => {
    if (%s) resolve(Date.now() / 1000);
    else if (performance.now() > end) resolve(null);
    else setTimeout(look, 15);
  };
  look();
})"""

_FRAMES = """(milliseconds) => new Promise((resolve) => {
  const frames = [];
  const tasks = [];
  const observer = new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) tasks.push(entry.duration);
  });
  observer.observe({ entryTypes: ["longtask"] });
  const start = performance.now();
  let last = start;
  const frame = (now) => {
    frames.push(now - last);
    last = now;
    const scroller = document.querySelector(".table-scroll");
    if (scroller) scroller.scrollTop += 60;
    if (now - start < milliseconds) return requestAnimationFrame(frame);
    observer.disconnect();
    frames.sort((a, b) => a - b);
    const at = (share) => frames[Math.min(frames.length - 1, Math.floor(frames.length * share))];
    resolve({
      frames: frames.length, p50: at(0.5), p99: at(0.99), longest: frames.at(-1),
      tasks: tasks.length, blocked: tasks.reduce((sum, ms) => sum + ms, 0),
    });
  };
  requestAnimationFrame(frame);
})"""


def has_text(text: str, selector: str = "main") -> str:
    """The condition that one of these elements has this text in it."""
    return (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".some((element) => element.innerText.includes({json.dumps(text)}))"
    )


class DashboardPage:
    """One tab with the dashboard of a coordinator; remembers what the browser complains about."""

    def __init__(self, page: Page, url: str, measured: Callable[[str], None]) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.is_coordinator_away = False
        """While it is, failed requests are no complaint."""
        self._measured = measured
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(f"{error}"))

    def _hear(self, message: ConsoleMessage) -> None:
        failed_request = message.text.startswith("Failed to load resource")
        if message.type == "error" and not (failed_request and self.is_coordinator_away):
            self.errors.append(message.text)

    def open(self, where: str = "overview", query: str = "") -> None:
        """Load the dashboard anew; ``where`` is what follows ``#/``."""
        self.page.goto(f"{self.url}/{query}#/{where}")

    def go(self, where: str) -> None:
        """Another page, as its links do it."""
        self.page.evaluate("(hash) => { location.hash = hash }", f"#/{where}")

    def text(self, selector: str = "main") -> str:
        return self.page.locator(selector).inner_text()

    def until(self, condition: str, within: float = 60.0) -> float:
        """Wait for a JavaScript condition; returns when it held, in seconds since 1970."""
        seen: float | None = self.page.evaluate(_SEEN % condition, within * 1000)
        assert seen is not None, f"not seen within {within:g} s: {condition}\n{self.text('body')}"
        return seen

    def until_text(self, text: str, selector: str = "main", within: float = 60.0) -> float:
        """Wait until an element has this text in it."""
        return self.until(has_text(text, selector), within)

    def until_live(self) -> None:
        self.until_text("Live", ".link-state")

    def measured(self, what: str) -> None:
        """Say a figure in the summary of the test run."""
        self._measured(what)

    def see_promptly(self, what: str, condition: str, happened: Callable[[], float]) -> None:
        """Wait for a condition, and say how long after the event it was seen."""
        latency = self.until(condition) - happened()
        self.measured(f"{what}: seen in the page after {latency:.2f} s")
        assert latency < PROMPT * SLACK, f"{what} was seen {latency:.1f} s after it happened"

    def smoothness(self, seconds: float) -> dict[str, float]:
        """Times of frames and of tasks over 50 ms, in ms, while tables scroll."""
        found: dict[str, float] = self.page.evaluate(_FRAMES, seconds * 1000)
        return found

    def accessibility(self) -> list[str]:
        """What axe finds against WCAG 2.1 AA, each with an example."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        violations: list[dict[str, Any]] = self.page.evaluate(
            "() => axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })"
            ".then((result) => result.violations)"
        )
        return [f"{found['id']}: {found['nodes'][0]['html'][:200]}" for found in violations]

    @property
    def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        return int(
            self.page.evaluate(
                "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )
