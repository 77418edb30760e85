"""One HTTP server that generates: JSON requests, and how its death is noticed.

A server that is slow is asked for its health while a request waits, so that one that is gone is known within seconds
and a long generation has no time-out. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from mvp_engine.errors import UserError

CONNECT_SECONDS = 4.0
HEALTH_EVERY = 2.0  # seconds between two questions while a request waits
HEALTH_SECONDS = 4.0  # for the answer: a server that is gone is named after 2 + 4 seconds
LONGEST_SECONDS = 3600.0  # without any byte from a server that says that it is healthy


class ServerGone(RuntimeError):
    """The server does not answer, or its engine died. Another server, or a restart, may help."""


class ServerRefused(RuntimeError):
    """The server answered with an error: the request is wrong, or the server was started without what it needs."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """A server by its URL. Methods may be called from several threads: each request has its own connection."""

    def __init__(self, url: str, *, health: str = "/health", api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"rollout.urls: {url} is no URL of a server, as http://localhost:8000")
        self._https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path
        self._health = health
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._healthy_at = -1e9  # monotonic time of the last sign of life

    def get(self, path: str) -> Any:
        return self._exchange("GET", path)

    def post(self, path: str, body: Any = None) -> Any:
        return self._exchange("POST", path, body)

    def check(self) -> None:
        """Raise `ServerGone` unless the server is healthy. Threads that wait share one question."""
        with self._lock:
            if time.monotonic() - self._healthy_at < HEALTH_EVERY:
                return
            try:
                self._exchange("GET", self._health, seconds=HEALTH_SECONDS)
            except ServerRefused as error:
                raise ServerGone(f"{self.url} is not healthy: {error}") from None
            self._healthy_at = time.monotonic()

    def _exchange(
        self, method: str, path: str, body: Any = None, *, seconds: float | None = None
    ) -> Any:
        """The answer to a request. Without `seconds` it may take as long as the server is healthy."""
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(
            self._host, self._port, timeout=min(seconds or CONNECT_SECONDS, CONNECT_SECONDS)
        )
        where = f"{method} {self.url}{path}"
        try:
            data = None if body is None else json.dumps(body)
            connection.connect()
            # A large body (media, many ids) may take longer than a connection.
            connection.sock.settimeout(seconds or LONGEST_SECONDS)
            connection.request(method, self._prefix + path, data, self._headers)
            if seconds is None:
                self._wait(connection)
            response = connection.getresponse()
            status = response.status
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._healthy_at = -1e9
            raise ServerGone(f"{where}: {reason}") from None
        finally:
            connection.close()
        if status >= 500 and path != self._health:  # of one request, or of an engine that died?
            self._healthy_at = -1e9
            self.check()
        return _answer(where, status, text)

    def _wait(self, connection: http.client.HTTPConnection) -> None:
        """Return when the answer begins; raise `ServerGone` when the server stops being healthy before."""
        readable = select.poll()
        readable.register(connection.sock, select.POLLIN)
        while not readable.poll(HEALTH_EVERY * 1000):
            self.check()


def _answer(where: str, status: int, text: str) -> Any:
    try:
        answer = json.loads(text) if text.strip() else {}
    except ValueError:
        answer = None
    if 200 <= status < 300:
        if answer is None:
            raise ServerRefused(f"{where}: the answer is not JSON: {text[:200]!r}", status)
        return answer
    reason = f"{where}: HTTP {status}: {_message(answer) or text[:500]}"
    if status in (
        502,
        503,
        504,
    ):  # a proxy without its server; a server that starts, or whose engine died
        raise ServerGone(reason)
    raise ServerRefused(reason, status)


def _message(answer: Any) -> str | None:
    """The error text of an answer in the usual forms."""
    while isinstance(answer, dict):
        answer = answer.get("error") or answer.get("message") or answer.get("detail")
    return None if answer is None else str(answer)
