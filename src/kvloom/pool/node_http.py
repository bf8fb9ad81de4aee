"""A node's own /healthz and /metrics, on an address that should be loopback or private."""

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from kvloom.net.sites import Policy, joined, refusal
from kvloom.pool.metrics import render
from kvloom.pool.node import NodeStats


class NodeHttp:
    """Serves in a thread of its own from `start` until `close`; `port` is the one in use."""

    def __init__(self, listener: socket.socket, stats: Callable[[], NodeStats], policy: Policy) -> None:
        """`listener` listens already and is closed with this."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:  # the base class's name
                refused = refusal(policy, "GET", self.path, joined(self.headers.items()))
                if refused is not None:
                    self.send_error(refused.status, explain=refused.text)
                elif self.path == "/healthz":
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
                """Requests are not logged."""

        self.port = int(listener.getsockname()[1])
        self._server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="ems-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
