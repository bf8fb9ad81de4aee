"""A node's own /healthz and /metrics, on an address that should be loopback or private."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from kvloom.pool.metrics import NodeStats, render


class NodeHttp:
    """Serves in a thread of its own until `close`; `port` is the one in use."""

    def __init__(self, address: tuple[str, int], stats: Callable[[], NodeStats]) -> None:
        """Raises OSError when the address is taken."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:  # the base class's naming
                if self.path == "/healthz":
                    self._answer(b'{"status":"ok"}', "application/json")
                elif self.path == "/stats":
                    self._answer(msgspec.json.encode(stats()), "application/json")
                elif self.path == "/metrics":
                    self._answer(render([stats()]), "text/plain; version=0.0.4")
                else:
                    self.send_error(404)

            def _answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are counted by nobody and logged nowhere."""

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="ems-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
