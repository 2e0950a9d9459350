"""What is served where the dashboard has been built, and where it has not."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from dtruntime.coordinator.http import http_server


def get(folder: Path, path: str) -> httpx.Response:
    """What a coordinator answers whose dashboard lies in a folder."""
    app = Starlette()
    app.router.default = http_server.dashboard_files(folder)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://strata") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "index-1a2b.js").write_text("void 0")
    (tmp_path / "index.html").write_text("<title>the dashboard</title>")
    return tmp_path


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_missing_dashboard_says_how_to_build_it(tmp_path: Path, path: str) -> None:
    answer = get(tmp_path, path)
    assert answer.status_code == 200
    assert "make dashboard" in answer.text


@pytest.mark.parametrize("path", ["/nothing", "/assets/nothing.js", "/%2e%2e/secret"])
def test_unknown_paths_are_not_found_either_way(tmp_path: Path, built: Path, path: str) -> None:
    assert get(tmp_path / "nowhere", path).status_code == 404
    assert get(built, path).status_code == 404


def test_page_is_asked_for_again_and_its_files_are_kept(built: Path) -> None:
    page = get(built, "/")
    assert ("the dashboard" in page.text, page.headers["cache-control"]) == (True, "no-cache")
    assert "immutable" in get(built, "/assets/index-1a2b.js").headers["cache-control"]
