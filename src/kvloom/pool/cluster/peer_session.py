"""PeerSession: one connected other node. It proves that it knows the cluster's secret; then its frames are tagged."""

import time
from collections.abc import Callable

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.exception import EmsErrorCode
from ems.keys import KEY_BYTES, NONCE_BYTES, proof, same
from ems.wire import messages as m
from ems.wire.frames import WireError
from kvloom.pool.cluster.arrivals import receive_blocks
from kvloom.pool.cluster.block_stream import send_blocks
from kvloom.pool.cluster.peer_line import checked_sums, session_keys
from kvloom.pool.node import Node
from kvloom.pool.storage.passing import UNSOUND, Announced
from kvloom.pool.storage.seals import sealed

_HANDSHAKE_S = 5.0
_MIN_BUDGET_S = 0.05
_MAX_BUDGET_S = 30.0


class PeerSession:
    """Runs in its own thread."""

    def __init__(self, channel: Channel, node: Node, new_nonce: Callable[[int], bytes]) -> None:
        self._channel = channel
        self._node = node
        self._new_nonce = new_nonce

    def run(self, hello: m.Hello, on_proof: Callable[[], None] = lambda: None) -> None:
        """Serve the peer from its Hello to the end of the connection. Never raises for what the peer does.

        on_proof: called when the peer has proved that it knows the secret.
        """
        try:
            if not self._authenticate(hello):
                return
            on_proof()
            while True:
                frame = self._channel.receive()
                budget_s = min(_MAX_BUDGET_S, max(_MIN_BUDGET_S, frame.deadline_ms / 1000))
                deadline_s = time.monotonic() + budget_s
                if isinstance(frame.message, m.PeerGet):
                    self._get(frame.message, deadline_s)
                elif isinstance(frame.message, m.PeerPut):
                    self._put(frame.message, deadline_s)
                else:
                    raise WireError("not a request of a peer")
        except CHANNEL_ERRORS:
            self._node.counts.add("peer_sessions_ended")

    def _authenticate(self, hello: m.Hello) -> bool:
        deadline_s = time.monotonic() + _HANDSHAKE_S
        secret, nonce = self._node.config.secret, self._new_nonce(NONCE_BYTES)
        self._channel.send(m.Challenge(nonce, b"peer"), deadline_s)
        claim = self._channel.receive(deadline_s).message
        expected = proof(secret, "peer caller", hello.access_id, hello.nonce, nonce)
        if not secret or not isinstance(claim, m.Proof) or not same(claim.proof, expected):
            self._node.counts.add("auth_failures")
            self._node.refused.note(f"node {hello.access_id!r}, which does not know the cluster's secret")
            return self._refuse("wrong proof: the cluster's secret is another one", deadline_s)
        if hello.access_id == self._node.config.node_id:
            problem = f"two agents are called {hello.access_id!r}: give each its own --node-id, and a peer its address"
            self._node.refused.note(f"a node, since {problem}")
            return self._refuse(problem, deadline_s)
        answer = proof(secret, "peer called", hello.access_id, hello.nonce, nonce)
        welcome = m.Welcome(self._node.incarnation, b"", answer, 0, self._node.config.slab_bytes, False)
        self._channel.send(welcome, deadline_s)
        theirs, ours = session_keys(secret, hello.nonce, nonce)
        self._channel.use_key(ours, theirs)
        return True

    def _refuse(self, problem: str, deadline_s: float) -> bool:
        self._channel.send(m.Failure(int(EmsErrorCode.EMS_IO_ERROR), problem), deadline_s)
        return False

    def _get(self, message: m.PeerGet, deadline_s: float) -> None:
        pool = self._node.pool(message.tenant)
        offered = pool.offer(m.split_keys(message.keys))
        try:
            lengths = offered.lengths
            seals = b"" if message.has_only else sealed(message.keys, offered.sums)
            self._channel.send(m.PeerBlocks(lengths, offered.sums, seals), deadline_s)
            if not message.has_only:
                send_blocks(self._channel, offered.spans, deadline_s)
                pool.counts.add("peer_reads", len(lengths) - lengths.count(0))
        finally:
            offered.release()

    def _put(self, message: m.PeerPut, deadline_s: float) -> None:
        pool = self._node.pool(message.tenant)
        keys = m.split_keys(message.keys)
        parents = message.parents or b"".join([message.parent or bytes(KEY_BYTES), *keys[:-1]])
        blocks = Announced(keys, message.lengths, checked_sums(message, message.keys), parents)
        told = b""
        for statuses, held, _lengths in receive_blocks(self._channel, pool, blocks, deadline_s):
            held.release()
            told += statuses.replace(bytes([UNSOUND]), bytes([m.Status.NO_ROOM]))
            pool.counts.add("peer_writes", statuses.count(m.Status.STORED))
        self._channel.send(m.Saved(told), deadline_s)
