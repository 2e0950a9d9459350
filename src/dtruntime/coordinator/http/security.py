"""Origin checks and security headers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .responses import HttpError

LOCAL_SUFFIXES = (".local", ".localhost", ".internal", ".lan", ".svc", ".cluster.local")
"""Suffixes of names that cannot be registered publicly."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class SecurityHeaders:
    """Adds headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sending)


class OriginPolicy:
    """Keeps pages of other origins from acting on behalf of their visitors."""

    def __init__(self, allowed: str, bound_host: str) -> None:
        self._allowed = {one.strip().rstrip("/").lower() for one in allowed.split(",")} - {""}
        names = {"localhost", bound_host, socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower() for name in names if name}

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise `HttpError` for a request from a page of another origin."""
        origin = headers.get("origin", "").lower()
        if origin in self._allowed:
            return
        if not origin:
            # Browsers send the origin with every POST, so this is not a browser.
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise _refusal("a page of another origin may not do that")
            return
        host = headers.get("host", "").lower()
        if urlsplit(origin).netloc != host:
            raise _refusal(f"a page of {origin[:200]} may not do that at {host[:200]}")
        self.check_host(headers)

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raise `HttpError` for a host name that somebody else may have pointed at this address."""
        host = headers.get("host", "").lower()
        if f"http://{host}" in self._allowed or f"https://{host}" in self._allowed:
            return
        if not self._is_ours(_name(host)):
            raise _refusal(f"{host[:200]} is not known as a name of this coordinator")

    def _is_ours(self, name: str) -> bool:
        if name in self._names or name.endswith(LOCAL_SUFFIXES):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return bool(name) and "." not in name
        return True


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _refusal(what: str) -> HttpError:
    return HttpError(
        403,
        "cross_origin",
        f"{what}: use the dashboard that this coordinator serves, or add the origin to "
        "http_origins in [coordinator]",
    )
