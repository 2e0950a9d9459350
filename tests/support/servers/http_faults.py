"""A proxy between a client and an HTTP server that answers, cuts and loses as a rule tells it."""

import re
import socket
import threading
from collections.abc import Callable
from typing import BinaryIO, Literal, Self

Action = int | Literal["cut", "lose", "half"] | None
"""A status to answer with; cut before or after the server was asked, or in the answer's middle."""
Rule = Callable[[str, int], Action]
"""What to do with a request line, the n-th one for which there was something to do."""

BODY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class HttpFaults:
    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.target = host, int(port)
        self.rule: Rule = lambda line, number: None
        self.requests: list[str] = []
        """Every request line so far."""
        self.faults = 0
        self.body = BODY
        """What comes with a status."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def fail(self, pattern: str, action: Action, times: int) -> None:
        """Do something to the first requests that a pattern is found in."""
        expression = re.compile(pattern)

        def rule(line: str, number: int) -> Action:
            return action if expression.search(line) and number <= times else None

        self.faults, self.rule = 0, rule

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.target) as server:
            incoming, answers = client.makefile("rb"), server.makefile("rb")
            try:
                while self._pass_on(client, server, incoming, answers):
                    pass
            except OSError:
                pass

    def _pass_on(
        self, client: socket.socket, server: socket.socket, incoming: BinaryIO, answers: BinaryIO
    ) -> bool:
        head, body = read_message(incoming)
        if not head:
            return False
        line = head.split(b"\r\n")[0].decode()
        action = self._decide(line)
        if action == "cut":
            return False
        if isinstance(action, int):
            length = b"Content-Length: %d\r\n" % len(self.body)
            answer = b"HTTP/1.1 %d No\r\n%s\r\n" % (action, length)
            client.sendall(answer + (b"" if line.startswith("HEAD") else self.body))
            return True
        server.sendall(head + body)
        head, body = read_message(answers, has_body=not line.startswith("HEAD"))
        if action == "lose" or not head:
            return False
        client.sendall(head + (body[: len(body) // 2] if action == "half" else body))
        return action != "half"

    def _decide(self, line: str) -> Action:
        with self._lock:
            self.requests.append(line)
            action = self.rule(line, self.faults + 1)
            self.faults += action is not None
            return action


def read_message(source: BinaryIO, *, has_body: bool = True) -> tuple[bytes, bytes]:
    """The head and the body of a request or an answer, as they are; empty at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = source.readline()
        if not line:
            return b"", b""
        head += line
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if not has_body or not (length or re.search(rb"(?i)transfer-encoding: *chunked", head)):
        return head, b""
    return head, source.read(int(length[1])) if length else read_chunks(source)


def read_chunks(source: BinaryIO) -> bytes:
    body = b""
    while True:
        line = source.readline()
        body += line + source.read(int(line, 16) + 2)
        if int(line, 16) == 0:
            return body
