"""ControlLink: an agent's heartbeat to the control plane; applies what it is told, and goes on without it."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import msgspec

from kvloom.pool.auth import Credential, node_token
from kvloom.pool.config import Address, TenantLimits, parse_address
from kvloom.pool.control_state import Heartbeat, Orders
from kvloom.pool.metrics import collect
from kvloom.pool.node import Node
from kvloom.pool.peers import Peers

_TIMEOUT_S = 3.0
_MAX_ANSWER_BYTES = 64 << 20


class ControlLink:
    """A thread that beats every `interval_s` until `close`."""

    def __init__(self, node: Node, peers: Peers, address: Callable[[], str], interval_s: float = 2.0) -> None:
        """address: host:port under which other nodes reach this one, "" when they cannot."""
        self.is_connected = False
        self._node = node
        self._peers = peers
        self._address = address
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ems-control", daemon=True)

    def start(self) -> None:
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
            credentials = [Credential.from_json(each) for each in orders.credentials]
            members = [Address(name, *parse_address(place)) for name, place in orders.members.items()]
        except (OSError, http.client.HTTPException, urllib.error.URLError, msgspec.MsgspecError, ValueError):
            self._node.counts["control_failures"] += 1
            return False
        self._node.keyring.replace(credentials)
        self._peers.set_members(members, frozenset(orders.draining))
        for tenant, guarantee, quota in orders.tenants:
            if not self._node.set_limits(TenantLimits(tenant, guarantee, quota)):
                self._node.counts["limits_refused"] += 1
        for tenant, size in orders.evict:
            self._node.pool(tenant).evict(size)
        return True

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S + 1)
