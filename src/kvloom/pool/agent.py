"""The node agent, `kvloom pool agent`: composition root, listening sockets, one thread a connection.

`python -m kvloom.pool.agent --ends-with-stdin` is what the SDK's embedded mode starts: it serves until its standard
input is closed, which the kernel does for a client that dies.
"""

import argparse
import contextlib
import gc
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.exception import EmsErrorCode
from ems.wire import messages as m
from kvloom.pool.auth import read_credentials
from kvloom.pool.config import (
    Address,
    AgentConfig,
    TenantLimits,
    default_socket,
    option,
    parse_address,
    parse_size,
    read_secret,
)
from kvloom.pool.control_link import ControlLink
from kvloom.pool.engines.engine import EngineError, open_engine
from kvloom.pool.engines.tier import EngineTier
from kvloom.pool.evict import ORDERS
from kvloom.pool.metrics import NodeStats, collect
from kvloom.pool.node import Node
from kvloom.pool.node_http import NodeHttp
from kvloom.pool.peer_session import PeerSession
from kvloom.pool.peers import Peers
from kvloom.pool.segments import huge_pages_in_use
from kvloom.pool.session import ClientSession
from kvloom.pool.snapshot import Snapshots

_HELLO_S = 5.0
_BACKLOG = 128
_GC_THRESHOLDS = (100_000, 10, 10)  # the index makes no garbage cycles; frequent walks over a million blocks cost time
_SWITCH_S = 0.0005  # how long a session may hold up the others' short answers


class Agent:
    """A running agent: `start`, then `close`. The threads are daemons; closing their sockets ends them."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ValueError or OSError when the configuration's files cannot be read."""
        self.config = config
        self.node = Node(config)
        if config.credentials is not None:
            self.node.keyring.replace(read_credentials(config.credentials))
        self.peer_port = 0
        self.peers: Peers | None = None
        self.engine: EngineTier | None = None
        self._control: ControlLink | None = None
        self._http: NodeHttp | None = None
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._sessions: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._is_closing = False
        self._snapshots = Snapshots(config.snapshot_dir) if config.snapshot_dir else None
        self._thread = threading.Thread(target=self._accept, name="ems-accept", daemon=True)

    def start(self) -> None:
        """Listens, then serves in the background.

        Raises OSError when the socket's place is taken or not ours, ValueError or EngineError for its engine.
        """
        if self.config.engine:
            self.engine = EngineTier(open_engine(self.config.engine, self.config.engine_password))
        try:
            self._listen_unix()
            if self.config.listen is not None:
                listener = socket.create_server(self.config.listen, backlog=_BACKLOG)
                self.peer_port = int(listener.getsockname()[1])
                self._add_listener(listener)
        except OSError:
            self._close_sockets()
            raise
        self._join_cluster()
        if self.config.http is not None:
            self._http = NodeHttp(self.config.http, self.stats)
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        self._thread.start()
        threading.Thread(target=self._warm, name="ems-warm", daemon=True).start()

    def _warm(self) -> None:
        """What makes the first calls better and need not be there for them: earlier blocks, then memory."""
        if self._snapshots is not None:
            self._snapshots.restore(self.node)
        if self.config.is_prefaulted:
            self.node.prepare()

    def _join_cluster(self) -> None:
        config = self.config
        if config.peers or config.control_url:
            self.peers = Peers(config.node_id, config.secret)
            self.peers.set_members(config.peers)
            self.node.others = self.peers
        if self.engine is not None:
            self.node.others = self.engine
        if config.control_url and self.peers is not None:
            self._control = ControlLink(self.node, self.peers, self._advertised)
            self._control.start()

    def _advertised(self) -> str:
        if self.config.advertise or self.config.listen is None:
            return self.config.advertise
        return f"{self.config.listen[0]}:{self.peer_port}"

    @property
    def http_port(self) -> int:
        """Port of /healthz and /metrics; 0 when they are off."""
        return self._http.port if self._http else 0

    def stats(self) -> NodeStats:
        """The node's numbers now."""
        status = {name: up for part in (self.peers, self.engine) if part for name, up in part.status().items()}
        return collect(self.node, status)

    def _listen_unix(self) -> None:
        path = self.config.socket
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o770)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if _is_serving(path):
            listener.close()
            raise OSError(f"another agent serves {path}")
        hidden = path.with_name(f"{path.name}.{os.getpid()}")  # whoever finds the socket's name can connect to it
        hidden.unlink(missing_ok=True)
        listener.bind(str(hidden))
        hidden.chmod(0o660)
        self._add_listener(listener)
        hidden.replace(path)

    def _add_listener(self, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        while not self._is_closing:
            for key, _events in self._selector.select():
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._wake_receive:
                    with contextlib.suppress(OSError):
                        sock, _address = key.fileobj.accept()
                        self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            is_full = len(self._sessions) >= self.config.max_sessions or self._is_closing
            if not is_full:
                self._sessions.add(sock)
        if is_full:
            self.node.counts["sessions_refused"] += 1
            sock.close()
            return
        threading.Thread(target=self._serve, args=(sock,), name="ems-session", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            frame = channel.receive(time.monotonic() + _HELLO_S)
            if isinstance(frame.message, m.Hello) and frame.message.is_peer and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                PeerSession(channel, self.node, secrets.token_bytes).run(frame.message)
            elif isinstance(frame.message, m.Hello) and sock.family == socket.AF_UNIX:
                ClientSession(channel, self.node, secrets.token_bytes).run(frame.message, frame.request_id)
            else:
                failure = m.Failure(int(EmsErrorCode.EMS_IO_ERROR), "expected a hello")
                channel.send(failure, time.monotonic() + _HELLO_S, request_id=frame.request_id)
        except CHANNEL_ERRORS:
            self.node.counts["sessions_broken"] += 1
        finally:
            with self._lock:
                self._sessions.discard(sock)
            channel.close()

    def _close_sockets(self) -> None:
        self._selector.close()
        for sock in (*self._listeners, self._wake_receive, self._wake_send):
            sock.close()

    def close(self) -> None:
        """Stops listening, ends all sessions, gives the memory back. Returns at once; calling it twice is fine."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake_send.send(b"x")
        self._thread.join()
        self.config.socket.unlink(missing_ok=True)
        with self._lock:
            for sock in self._sessions:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._close_sockets()
        for part in (self._http, self._control, self.peers, self.engine):
            if part is not None:
                part.close()
        if self._snapshots is not None:
            self._snapshots.write(self.node)
        self.node.close()


def _is_serving(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _parser() -> argparse.ArgumentParser:
    size, address = option(parse_size), option(parse_address)
    parser = argparse.ArgumentParser(prog="kvloom pool agent", description="Serve this node's share of the KV pool.")
    parser.add_argument("--socket", type=Path, default=default_socket(), help="Unix socket for engines on this node")
    parser.add_argument("--pool", type=size, default=1 << 30, help="memory of all tenants, for example 16G")
    parser.add_argument("--segment", type=size, default=64 << 20, help="size of one shared file")
    parser.add_argument("--slab", type=size, default=16 << 20, help="size of the largest block")
    parser.add_argument("--rcache", type=float, help="share of a quota for others' blocks: 0.25, or 1 with --engine")
    parser.add_argument(
        "--eviction", default="s3fifo", choices=ORDERS, help="which blocks go first when room is needed"
    )
    parser.add_argument("--put-rate", type=size, default=0, help="bytes a second each tenant may save, as in 500M")
    parser.add_argument("--credentials", type=Path, help="JSON file of credentials; without it the node is open")
    parser.add_argument(
        "--tenant", type=option(TenantLimits.parse), action="append", default=[], help="id:guarantee:quota"
    )
    parser.add_argument("--secret-file", help="file with the cluster's secret, at least 32 bytes")
    parser.add_argument("--node-id", default="", help="name of this node in the cluster; random when not given")
    parser.add_argument("--listen", type=address, help="host:port for other nodes; port 0 picks one")
    parser.add_argument("--advertise", default="", help="host:port under which other nodes reach this one")
    parser.add_argument("--control", default="", help="URL of the control plane; the secret is the node's password")
    parser.add_argument(
        "--state", type=Path, help="file that keeps what the control plane said, for a restart without it"
    )
    parser.add_argument("--http", type=address, help="host:port of /healthz and /metrics")
    parser.add_argument(
        "--peer", type=option(Address.parse), action="append", default=[], help="id=host:port of another node"
    )
    parser.add_argument("--engine", default="", help="URL of a distributed store: valkey://, unix://, mooncake://")
    parser.add_argument("--engine-password-file", type=Path, help="file with the store's password")
    parser.add_argument("--direct", action="store_true", help="engines write into the pool themselves (trusted node)")
    parser.add_argument(
        "--no-prefault", action="store_true", help="take memory when it is first used, not at the start"
    )
    parser.add_argument(
        "--huge-pages", action="store_true", help="take the pool from huge pages; without them, from ordinary ones"
    )
    parser.add_argument("--snapshot-dir", type=Path, help="folder that keeps the blocks over an orderly restart")
    parser.add_argument("--ends-with-stdin", action="store_true", help="stop when standard input is closed")
    return parser


def config_from(arguments: list[str]) -> AgentConfig:
    """AgentConfig of a command line. Raises SystemExit, OSError or ValueError."""
    args = _parser().parse_args(arguments)
    named = {"node_id": args.node_id} if args.node_id else {}
    return AgentConfig(
        socket=args.socket,
        pool_bytes=args.pool,
        segment_bytes=min(args.segment, args.pool),
        slab_bytes=min(args.slab, args.segment, args.pool),
        eviction=args.eviction,
        put_rate=args.put_rate,
        rcache_share=args.rcache if args.rcache is not None else 1.0 if args.engine else 0.25,
        is_open=args.credentials is None and not args.control,
        credentials=args.credentials,
        tenants=tuple(args.tenant),
        secret=read_secret(args.secret_file) if args.secret_file else b"",
        is_direct=args.direct,
        is_prefaulted=not args.no_prefault,
        has_huge_pages=args.huge_pages,
        snapshot_dir=args.snapshot_dir,
        ends_with_stdin=args.ends_with_stdin,
        peers=tuple(args.peer),
        listen=args.listen,
        advertise=args.advertise,
        control_url=args.control,
        state=args.state,
        engine=args.engine,
        engine_password=args.engine_password_file.read_text().strip() if args.engine_password_file else "",
        http=args.http,
        **named,
    )


def main(arguments: list[str]) -> int:
    """Serves until SIGTERM, SIGINT or, if asked for, the end of standard input. Exit status 1: could not start."""
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)
    stop_read, stop_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop_write, b"x"))
    try:
        agent = Agent(config_from(arguments))
        agent.start()
    except (OSError, ValueError, EngineError) as error:
        print(f"kvloom pool agent: {error}", file=sys.stderr)
        return 1
    if agent.config.has_huge_pages:
        print(f"kvloom pool agent: memory of {huge_pages_in_use()}", file=sys.stderr, flush=True)
    print(f"kvloom pool agent: serving {agent.config.socket}", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(stop_read, selectors.EVENT_READ)
        if agent.config.ends_with_stdin:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.select()
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
