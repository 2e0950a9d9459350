"""The dashboard: the built files, or a page that says how to build them."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

MISSING = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Strata</title>
<h1>Strata</h1>
<p>The coordinator works, but its dashboard has not been built: run <code>make dashboard</code> in
the repository and start the coordinator again.</p>
<p>The same figures: <a href="api/dashboard">/api/dashboard</a>, <a href="metrics">/metrics</a>,
<a href="openapi.json">/openapi.json</a>, or <code>strata status --watch</code>.</p>
</html>
"""
FOREVER = "public, max-age=31536000, immutable"


def static_folder() -> Path:
    """Where the built dashboard lies."""
    return Path(str(resources.files("dtruntime"))) / "dashboard" / "static"


class _Files(StaticFiles):
    """Files whose names change with their content are kept by browsers; the page never is."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        hashed = path.startswith("assets/") and response.status_code < 400
        response.headers["Cache-Control"] = FOREVER if hashed else "no-cache"
        return response


def dashboard(folder: Path | None = None) -> ASGIApp:
    """Serves the dashboard."""
    place = static_folder() if folder is None else folder
    if not (place / "index.html").is_file():
        return Router([Route("/", _missing), Route("/index.html", _missing)])
    return GZipMiddleware(_Files(directory=place, html=True), minimum_size=1024, compresslevel=5)


async def _missing(_: Request) -> Response:
    return HTMLResponse(MISSING, headers={"Cache-Control": "no-cache"})
