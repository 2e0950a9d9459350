"""A dashboard without a coordinator, without workers, and in its demo mode."""

import re

from tests.browser.pages import PAGES
from tests.support.workers import RemoteWorker


def test_coordinator_killed_and_started_again(own_coordinator, open_page):
    dashboard = open_page(own_coordinator.http_url)
    with RemoteWorker(own_coordinator.url, rank=0, world_size=1) as worker:
        worker.register()
        worker.call("report", step=7, state="training")
        dashboard.open("workers")
        dashboard.until_text("training", ".table-row")

        dashboard.is_coordinator_away = True
        own_coordinator.kill()
        dashboard.until_text("Connection lost", ".banner")
        dashboard.until_text("Disconnected", ".link-state")
        assert "worker-0" in dashboard.text(".table-body")  # what was known stays
        assert "stale" in (dashboard.page.locator("main").get_attribute("class") or "")

        assert dashboard.page.get_by_role("button", name="Try now").is_visible()
        own_coordinator.start()
        # Not a click of Playwright's, which waits for a button that a page that came back by
        # itself has no more.
        dashboard.page.evaluate("document.querySelector('.banner button')?.click()")
        dashboard.until_live()
        dashboard.is_coordinator_away = False
        dashboard.until("!document.querySelector('.banner')")
        worker.call("report", step=8)
        dashboard.until_text("8", ".table-row")


def test_reconnects_by_itself(own_coordinator, open_page):
    dashboard = open_page(own_coordinator.http_url)
    dashboard.open()
    dashboard.until_live()
    dashboard.is_coordinator_away = True
    own_coordinator.kill()
    dashboard.until_text("Disconnected", ".link-state")
    own_coordinator.start()
    dashboard.until_live()


def test_empty_coordinator_says_what_to_run(own_coordinator, open_page):
    dashboard = open_page(own_coordinator.http_url)
    dashboard.open()
    address = own_coordinator.url.removeprefix("http://")
    dashboard.until_text(f"COORDINATOR_URL={address}")
    titles = {
        "workers": "No worker has joined yet",
        "data": "No datasets yet",
        "checkpoints": "No checkpoints yet",
        "barriers": "No barriers yet",
        "runs": "No worker has joined yet",
        "journal": "Nothing has happened yet",
    }
    for page, title in titles.items():
        dashboard.go(page)
        dashboard.until_text(title)


def test_demo_mode_is_labelled_on_every_page(own_coordinator, open_page):
    dashboard = open_page(own_coordinator.http_url)
    requests: list[str] = []
    dashboard.open(query="?demo=1")
    dashboard.until_text("Simulated data", ".demo-strip")
    dashboard.page.on("request", lambda request: requests.append(request.url))
    for page in PAGES:
        dashboard.go(page)
        dashboard.until_text("Simulated data", ".demo-strip")
        dashboard.until("document.querySelector('main h1, main h2')")
    assert [url for url in requests if re.search(r"/api/", url)] == []
