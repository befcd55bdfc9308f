"""A network between a client and an HTTP server: it drops connections, loses answers, cuts them short and dawdles."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("refuse", "lose the answer", "cut the answer short", "dawdle", "be unavailable")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class FlakyNetwork:
    """Listens on a port of its own. `rate`: the share of requests that something happens to."""

    def __init__(self, server_port: int, rate: float = 0.0, seed: int = 0) -> None:
        self.rate, self.server_port = rate, server_port
        self.faults: Counter[str] = Counter()
        self.is_down = False
        self.before: Callable[[str, str], None] = lambda method, path: None
        """Called with every request, before it is passed on."""
        self._random = random.Random(seed)
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._listener.daemon_threads = True
        self.port = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def choose(self) -> str | None:
        if self.is_down:
            return "refuse"
        fault = self._random.choice(FAULTS) if self._random.random() < self.rate else None
        if fault is not None:
            self.faults[fault] += 1
        return fault

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        network = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self._body()
                network.before(self.command, self.path)
                fault = network.choose()
                if fault == "refuse":
                    self.close_connection = True
                    return
                if fault == "be unavailable":
                    self._answer(503, [], b"", 0)
                    return
                if fault == "dawdle":
                    time.sleep(0.3)
                status, headers, content, length = self._ask(body)
                if fault == "lose the answer":
                    self.close_connection = True
                    return
                if fault == "cut the answer short":
                    self.close_connection = True
                    content = content[: len(content) // 2]
                self._answer(status, headers, content, length)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes, int]:
                connection = http.client.HTTPConnection("127.0.0.1", network.server_port, timeout=30)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
                try:
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    content = answer.read()
                    length = int(answer.headers.get("Content-Length", len(content)))
                    return answer.status, answer.getheaders(), content, length
                finally:
                    connection.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(content)

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # the client was killed
                    self.close_connection = True

        return Handler
