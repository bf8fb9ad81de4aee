"""ControlLink: an agent's heartbeat to the control plane; applies what it is told, and goes on without it."""

import hashlib
import hmac
import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec

from ems.keys import derive, same
from kvloom.pool.auth import Credential, node_token
from kvloom.pool.config import Address, TenantLimits, parse_address
from kvloom.pool.control_state import Heartbeat, Orders
from kvloom.pool.metrics import collect
from kvloom.pool.node import Node
from kvloom.pool.peers import Peers

_TIMEOUT_S = 3.0
_MAX_ANSWER_BYTES = 64 << 20
_SIGNATURE_BYTES = 32


class ControlLink:
    """A thread that beats every `interval_s` until `close`."""

    def __init__(self, node: Node, peers: Peers, address: Callable[[], str], interval_s: float = 2.0) -> None:
        """address: host:port under which other nodes reach this one, "" when they cannot."""
        self.is_connected = False
        self._node = node
        self._peers = peers
        self._address = address
        self._interval_s = interval_s
        self._kept: Orders | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ems-control", daemon=True)

    def start(self) -> None:
        """Begins with what an earlier life of this node was told, if it kept that, until the first answer comes."""
        state = self._node.config.state
        kept = read_orders(state, self._node.config.secret) if state is not None else None
        if kept is not None:
            self._apply(kept)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.is_connected = self.beat()
            self._stop.wait(self._interval_s)

    def beat(self) -> bool:
        """One heartbeat; False, and nothing changed, when the control plane did not give a valid answer."""
        config = self._node.config
        beat = Heartbeat(self._address(), collect(self._node, self._peers.status()))
        request = urllib.request.Request(
            f"{config.control_url.rstrip('/')}/v1/nodes/{config.node_id}:heartbeat",
            data=msgspec.json.encode(beat),
            headers={"Authorization": f"Bearer {node_token(config.secret)}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                orders = msgspec.json.decode(answer.read(_MAX_ANSWER_BYTES), type=Orders)
            self._apply(orders)
        except (OSError, http.client.HTTPException, urllib.error.URLError, msgspec.MsgspecError, ValueError):
            self._node.counts["control_failures"] += 1
            return False
        for tenant, size in orders.evict:
            self._node.pool(tenant).evict(size)
        if config.state is not None:
            self._keep(config.state, orders)
        return True

    def _keep(self, state: Path, orders: Orders) -> None:
        kept = msgspec.structs.replace(orders, evict=[])
        if kept == self._kept:
            return
        try:
            write_orders(state, self._node.config.secret, kept)
            self._kept = kept
        except OSError:
            self._node.counts["state_failures"] += 1

    def _apply(self, orders: Orders) -> None:
        """Raises ValueError, and changes nothing, when the orders make no sense."""
        credentials = [Credential.from_json(each) for each in orders.credentials]
        members = [Address(name, *parse_address(place)) for name, place in orders.members.items()]
        self._node.keyring.replace(credentials)
        self._peers.set_members(members, frozenset(orders.draining))
        for tenant, guarantee, quota in orders.tenants:
            if not self._node.set_limits(TenantLimits(tenant, guarantee, quota)):
                self._node.counts["limits_refused"] += 1

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S + 1)


def write_orders(path: Path, secret: bytes, orders: Orders) -> None:
    """Keeps orders in a file that only its owner reads, signed with the cluster's secret; the old file or the new one.

    It holds verifiers of access keys, never keys. Raises OSError.
    """
    body = msgspec.json.encode(orders)
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(_signature(secret, body) + body)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read_orders(path: Path, secret: bytes) -> Orders | None:
    """The orders kept in a file; None when there is none or the cluster's secret did not sign it."""
    try:
        data = path.read_bytes()
        signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        return msgspec.json.decode(body, type=Orders) if same(signature, _signature(secret, body)) else None
    except (OSError, msgspec.MsgspecError):
        return None


def _signature(secret: bytes, body: bytes) -> bytes:
    return hmac.new(derive(secret, "kept orders"), body, hashlib.sha256).digest()
