"""The node agent, `kvloom pool agent`: composition root, listening sockets, one thread a connection."""

import gc
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.exception import EmsErrorCode
from ems.wire import messages as m
from ems.wire.frames import WireError
from kvloom.net.listening import UnixListener, allow_descriptors, bracketed, listen, own_names
from kvloom.net.sites import Policy
from kvloom.net.tlsconfig import TlsConfig, TlsError
from kvloom.pool.auth import read_credentials
from kvloom.pool.cluster.native.library import prepare as prepare_stream
from kvloom.pool.cluster.peer_session import PeerSession
from kvloom.pool.cluster.peers import Peers
from kvloom.pool.cluster.secured import Complaints, SecuredChannel, TlsBroken, problem_of
from kvloom.pool.config import AgentConfig, read_option
from kvloom.pool.door import BACKLOG, Door, notice_loss
from kvloom.pool.node import Node, NodeStats, collect
from kvloom.pool.session import ClientSession, count_end
from kvloom.pool.snapshot import Snapshots
from kvloom.pool.storage.counts import Denial
from kvloom.pool.storage.opening import prepare
from kvloom.pool.storage.segments import huge_pages_in_use
from kvloom.pool.stores.engine import open_engine
from kvloom.pool.stores.tier import EngineTier
from kvloom.processes.inside import signal_at_end_of_stdin

if TYPE_CHECKING:
    from kvloom.pool.cluster.tls_channel import NodeTls
    from kvloom.pool.control.link import ControlLink
    from kvloom.pool.node_http import NodeHttp

logger = logging.getLogger(__name__)

_STOP, _RELOAD = b"x", b"r"  # bytes that signal handlers write to the pipe that `serve` waits on
_HELLO_S = 5.0
# the index creates no reference cycles, and walking a million blocks often costs time
_GC_THRESHOLDS = (100_000, 10, 10)
_SWITCH_S = 0.0005  # longest time that a session may delay the short answers of others


def _open_tls(config: TlsConfig) -> "NodeTls":
    """Raises TlsError. Imports OpenSSL only if connections are encrypted."""
    opened: NodeTls = import_module("kvloom.pool.cluster.tls_channel").NodeTls(config)
    return opened


class Agent:
    """A running agent: `start`, then `close`. The threads are daemons; closing their sockets ends them."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ValueError or OSError when the configuration's files cannot be read."""
        self.config = config
        self.node = Node(config)
        if config.credentials is not None:
            self.node.replace_credentials(read_option("--credentials", config.credentials, read_credentials))
        self.tls = _open_tls(config.tls) if config.tls is not None else None
        self.peer_port = 0
        self.peers: Peers | None = None
        self.engine: EngineTier | None = None
        self._control: ControlLink | None = None
        self._http: NodeHttp | None = None
        self._door = Door(config.max_sessions, self._begin)
        self._unix: UnixListener | None = None
        self._sessions: set[Channel] = set()
        self._complaints = Complaints()
        self._lock = threading.Lock()
        self._is_closing = False
        self._snapshots = Snapshots(config.snapshot_dir) if config.snapshot_dir else None
        self._thread = threading.Thread(target=self._door.serve, name="ems-accept", daemon=True)

    def start(self) -> None:
        """Listens, then serves in the background.

        Raises ListenError when an address is taken or not ours, ValueError or EngineError for its engine.
        """
        try:
            self._listen()
            if self.config.engine:
                self.engine = EngineTier(open_engine(self.config.engine, self.config.engine_password))
        except BaseException:
            self._close_sockets()
            raise
        self._join_cluster()
        if self._http is not None:
            self._http.start()
        self._thread.start()
        threading.Thread(target=self._warm, name="ems-warm", daemon=True).start()

    def _warm(self) -> None:
        """Work that speeds up the first calls but need not be done before them: load the snapshot, then take memory."""
        if self._snapshots is not None:
            self._snapshots.restore(self.node)
        if self.config.is_prefaulted:
            self.node.prepare()

    def _join_cluster(self) -> None:
        config = self.config
        if config.peers or config.control_url:
            self.peers = Peers(
                config.node_id, config.secret, self.tls, config.peer_connections, config.geometry.slab_bytes
            )
            self.peers.set_members(config.peers)
            self.node.others = self.peers
        if self.engine is not None:
            self.node.others = self.engine
        if config.control_url and self.peers is not None:
            link = import_module("kvloom.pool.control.link")  # imports an HTTP client, only needed with a control plane
            control = self._control = link.ControlLink(self.node, self.peers, self._advertised, self.stats)
            control.start()

    def _advertised(self) -> str:
        if self.config.advertise or self.config.listen is None:
            return self.config.advertise
        return f"{bracketed(self.config.listen[0])}:{self.peer_port}"

    @property
    def http_port(self) -> int:
        """Port of /healthz and /metrics; 0 when they are off."""
        return self._http.port if self._http else 0

    def stats(self) -> NodeStats:
        """The node's figures now."""
        status = {name: up for part in (self.peers, self.engine) if part for name, up in part.status().items()}
        gauges = {
            "sessions": self._door.num_inside(socket.AF_UNIX),
            "sessions_limit": self.config.max_sessions,
            "staging_bytes": self.node.staging.used_bytes,
            "staging_limit_bytes": self.node.staging.total_bytes,
        }
        return collect(self.node, status, gauges, self._door.counts)

    def _listen(self) -> None:
        """Listen on all addresses first, so that one that is in use ends the start. Raises ListenError."""
        config = self.config
        self._unix = UnixListener(
            config.socket, config.socket_mode, BACKLOG, config.socket_group, is_temporary=config.ends_with_stdin
        )
        self._door.add(self._unix.socket, self._unix.renewed)
        if self.config.listen is not None:
            listener = listen(*self.config.listen, BACKLOG, "--listen")
            self.peer_port = int(listener.getsockname()[1])
            self._door.add(listener)
        if self.config.http is not None:
            hosts = self.config.allowed_hosts | own_names([self.config.http[0]])
            http = import_module("kvloom.pool.node_http")  # imports Prometheus, only needed for HTTP
            self._http = http.NodeHttp(listen(*self.config.http, BACKLOG, "--http"), self.stats, Policy(hosts))

    def _begin(self, sock: socket.socket, address: Any) -> None:
        """address: as `accept` returns it. Raises OSError when the caller has disconnected, RuntimeError when no thread
        is available.
        """
        is_tcp = sock.family != socket.AF_UNIX
        channel = self.tls.channel(sock, is_server=True) if self.tls and is_tcp else Channel(sock)
        with self._lock:
            self._sessions.add(channel)
        caller = f"a node at {address[0]}" if is_tcp else ""
        try:
            threading.Thread(target=self._serve, args=(channel, caller), name="ems-session", daemon=True).start()
        except RuntimeError:
            self.node.counts.add(Denial.NO_THREAD.counter)
            with self._lock:
                self._sessions.discard(channel)
            raise

    def _serve(self, channel: Channel, caller: str) -> None:
        sock, deadline_s = channel.sock, time.monotonic() + _HELLO_S
        place = self._door.place(sock.family)
        try:
            if isinstance(channel, SecuredChannel):
                channel.handshake(deadline_s)
                channel.refuse_revoked()
            frame = channel.receive(deadline_s)
            self._complaints.forget(caller)
            if isinstance(frame.message, m.Hello) and frame.message.is_peer and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                notice_loss(sock)
                # nodes that know the secret are as many as the cluster has, so they take no place of later callers
                PeerSession(channel, self.node, secrets.token_bytes).run(frame.message, place.leave)
            elif isinstance(frame.message, m.Hello) and sock.family == socket.AF_UNIX:
                ClientSession(channel, self.node, secrets.token_bytes).run(frame.message, frame.request_id)
            else:
                self.node.counts.add(Denial.MALFORMED.counter)
                failure = m.Failure(int(EmsErrorCode.EMS_IO_ERROR), "expected a hello")
                channel.send(failure, time.monotonic() + _HELLO_S, request_id=frame.request_id)
        except CHANNEL_ERRORS as error:
            count_end(self.node.counts, error)
            if caller and isinstance(error, WireError | TlsBroken):
                self._complaints.warn(caller, problem_of(error, self.tls is not None))
        finally:
            with self._lock:
                self._sessions.discard(channel)
            channel.close()
            place.leave()

    def reload_tls(self) -> None:
        """Read the TLS files again for new connections, and end connections of revoked nodes.

        Invalid files are logged and change nothing.
        """
        if self.tls is None:
            return
        try:
            self.tls.reload()
        except TlsError as error:
            logger.error("TLS files are not reloaded, the ones in use stay: %s", error)
        else:
            num_ended = self._end_revoked()
            logger.info(
                "TLS files reloaded%s", f"; {num_ended} connections of revoked nodes ended" if num_ended else ""
            )

    def _end_revoked(self) -> int:
        with self._lock:
            revoked = [each for each in self._sessions if isinstance(each, SecuredChannel) and each.is_revoked]
            for channel in revoked:
                channel.abort()
        return len(revoked) + (self.peers.end_revoked() if self.peers else 0)

    def _close_sockets(self) -> None:
        for part in (self._unix, self._http, self._door):
            if part is not None:
                part.close()

    def close(self) -> None:
        """Stop listening, end all sessions, free the memory. Returns at once; may be called twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self._door.stop()
        self._thread.join()
        self._close_sockets()
        with self._lock:
            for channel in self._sessions:
                channel.abort()
        for part in (self._control, self.peers, self.engine):
            if part is not None:
                part.close()
        if self._snapshots is not None:
            self._snapshots.write(self.node)
        self.node.close()


def prepare_libraries(config: AgentConfig) -> None:
    """Has those that such an agent calls before a client waits for it: a call has a deadline."""
    prepare()
    if config.listen or config.peers or config.control_url:
        prepare_stream()


def serve(config: AgentConfig) -> None:
    """Serve until SIGTERM, SIGINT or, if asked for, the end of standard input, which the kernel closes when the client
    of a private agent dies. Raises OSError, ValueError, EngineError or TlsError when it cannot start.
    """
    logging.basicConfig(level=logging.INFO, format="kvloom pool agent: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs each heartbeat
    gc.set_threshold(*_GC_THRESHOLDS)
    allow_descriptors()
    sys.setswitchinterval(_SWITCH_S)
    stop_read, stop_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop_write, _STOP))
    if config.ends_with_stdin:
        signal_at_end_of_stdin(signal.SIGCONT)  # it ends also where it is stopped then
    prepare_libraries(config)
    agent = Agent(config)
    agent.start()
    if agent.config.has_huge_pages:
        print(
            f"kvloom pool agent: memory of {huge_pages_in_use(agent.config.is_prefaulted)}", file=sys.stderr, flush=True
        )
    if agent.tls is not None:
        signal.signal(signal.SIGHUP, lambda *_: os.write(stop_write, _RELOAD))
    print(f"kvloom pool agent: serving {agent.config.socket}", flush=True)
    with selectors.PollSelector() as selector:  # epoll refuses a file or /dev/null as standard input
        selector.register(stop_read, selectors.EVENT_READ)
        if agent.config.ends_with_stdin:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while [key.fd for key, _events in selector.select()] == [stop_read] and os.read(stop_read, 1) == _RELOAD:
            agent.reload_tls()
    agent.close()
