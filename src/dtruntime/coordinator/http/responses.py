"""HTTP answers with ETag and compression, and errors."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import grpc
import msgspec
import xxhash
from starlette.responses import Response

from ...rpc.status_codes import CODES
from ..state import Refused
from .views import Error, ErrorDetail

JSON = "application/json"
COMPRESSED_FROM = 1024
IN_THREAD_FROM = 64 * 1024
GZIP_LEVEL = 1
"""Ten times faster than the highest, and answers still shrink to a tenth."""

_Code = grpc.StatusCode
_STATUSES: dict[grpc.StatusCode, HTTPStatus] = {
    _Code.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    _Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    _Code.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    _Code.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    _Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    _Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


class HttpError(Exception):
    """An error answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @classmethod
    def of(cls, refused: Refused) -> HttpError:
        """A refusal of the service as an HTTP error."""
        status = _STATUSES.get(CODES[refused.reason], HTTPStatus.INTERNAL_SERVER_ERROR)
        return cls(status, refused.reason, str(refused))

    def response(self) -> Response:
        """The answer."""
        body = msgspec.json.encode(Error(ErrorDetail(self.code, str(self))))
        return Response(body, self.status, media_type=JSON, headers={"Cache-Control": "no-store"})


class Answer:
    """A body that may be sent to many clients; compressed at most once."""

    def __init__(
        self,
        body: bytes,
        media_type: str = JSON,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.body = body
        self.media_type = media_type
        self.status = status
        self.headers = dict(headers or {})
        self._etag = ""
        self._compressed: asyncio.Future[bytes] | None = None

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        """A value as JSON."""
        return cls(msgspec.json.encode(value), status=status)

    async def response(self, asked: Mapping[str, str]) -> Response:
        """The answer to a request with these headers."""
        headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding", **self.headers}
        if self.status == HTTPStatus.OK:
            self._etag = self._etag or f'"{xxhash.xxh3_128_hexdigest(self.body)}"'
            headers["ETag"] = f"W/{self._etag}"
            if _matches(asked.get("if-none-match", ""), self._etag):
                return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        body = self.body
        if len(body) >= COMPRESSED_FROM and _takes_gzip(asked.get("accept-encoding", "")):
            body = await self._gzipped()
            headers["Content-Encoding"] = "gzip"
        return Response(body, self.status, headers, self.media_type)

    async def _gzipped(self) -> bytes:
        if self._compressed is None:
            if len(self.body) < IN_THREAD_FROM:
                self._compressed = asyncio.get_running_loop().create_future()
                self._compressed.set_result(_compress(self.body))
            else:
                work = asyncio.to_thread(_compress, self.body)
                self._compressed = asyncio.ensure_future(work)
        return await asyncio.shield(self._compressed)


def _compress(body: bytes) -> bytes:
    return gzip.compress(body, GZIP_LEVEL, mtime=0)


def _takes_gzip(accepted: str) -> bool:
    for part in accepted.lower().split(","):
        name, _, rest = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return rest.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _matches(given: str, etag: str) -> bool:
    known = [one.strip().removeprefix("W/") for one in given.split(",")]
    return etag in known or given.strip() == "*"
