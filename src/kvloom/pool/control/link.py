"""ControlLink: an agent's heartbeat to the control plane; applies its orders, and continues without it."""

import hashlib
import hmac
import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from ems.keys import derive, same
from kvloom.pool.auth import Credential, node_token
from kvloom.pool.cluster.peers import Peers
from kvloom.pool.config import Address, TenantLimits, parse_address
from kvloom.pool.control.state import Heartbeat, Orders
from kvloom.pool.node import Node, NodeStats
from kvloom.reading import read_bytes
from kvloom.writing import write_private

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0  # seconds to connect, and of each pause within an answer
_ANSWER_S = 30.0
_MAX_ANSWER_BYTES = 64 << 20
_SIGNATURE_BYTES = 32
_MAX_REASON = 300  # characters of the refusal in the log


class _Refusal(msgspec.Struct):
    error_msg: str


class ControlLink:
    """A thread that sends a heartbeat every `interval_s` until `close`."""

    def __init__(
        self,
        node: Node,
        peers: Peers,
        address: Callable[[], str],
        stats: Callable[[], NodeStats],
        interval_s: float = 2.0,
    ) -> None:
        """address: host:port at which other nodes reach this one, "" when they cannot. stats: the node's figures."""
        self.is_connected = False
        self._node = node
        self._peers = peers
        self._address = address
        self._stats = stats
        self._interval_s = interval_s
        self._kept: Orders | None = None
        self._complaint = ""
        self._refused: list[TenantLimits] = []
        self._stop = threading.Event()
        # the system's authorities, and no proxy: it would see the token
        self._client = httpx.Client(timeout=_TIMEOUT_S, verify=ssl.create_default_context(), trust_env=False)
        self._thread = threading.Thread(target=self._run, name="ems-control", daemon=True)

    def start(self) -> None:
        """Until the first answer, uses the orders that an earlier run of this node has stored, if any."""
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
        beat = Heartbeat(self._address(), self._stats(), self._node.incarnation.hex())
        try:
            orders = msgspec.json.decode(self._post(msgspec.json.encode(beat)), type=Orders)
            self._apply(orders)
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._node.counts.add("control_failures")
            self._complain(f"the control plane {config.control_url} gave no valid answer: {one_line(error)}")
            return False
        self._complain("")
        for tenant, size in orders.evict:
            self._node.evict(tenant, size)
        if config.state is not None:
            self._keep(config.state, orders)
        return True

    def _post(self, beat: bytes) -> bytes:
        """Send a heartbeat and return the answer. Raises HTTPError, or ValueError for an answer that is too long or too
        slow.
        """
        config = self._node.config
        url = f"{config.control_url.rstrip('/')}/v1/nodes/{config.node_id}:heartbeat"
        headers = {"Authorization": f"Bearer {node_token(config.secret)}", "Content-Type": "application/json"}
        answer, deadline_s = bytearray(), time.monotonic() + _ANSWER_S
        with self._client.stream("POST", url, content=beat, headers=headers) as response:
            for chunk in response.iter_bytes():
                answer += chunk
                if len(answer) > _MAX_ANSWER_BYTES or time.monotonic() > deadline_s:
                    raise ValueError(f"more than {_MAX_ANSWER_BYTES} bytes or {_ANSWER_S:g} seconds of answer")
            if response.is_error and (reason := _reason(answer)):
                raise ValueError(f"{response.status_code}, {reason}")
            response.raise_for_status()
        return bytes(answer)

    def _complain(self, problem: str) -> None:
        """Log a problem when it begins, and when it is over."""
        if problem != self._complaint:
            log.warning("%s", problem or "the control plane answers again")
        self._complaint = problem

    def _keep(self, state: Path, orders: Orders) -> None:
        kept = msgspec.structs.replace(orders, evict=[])
        if kept == self._kept:
            return
        try:
            write_orders(state, self._node.config.secret, kept)
            self._kept = kept
        except OSError as error:
            if not self._node.counts["state_failures"]:
                log.error("what the control plane said is not kept for a restart: %s", error)
            self._node.counts.add("state_failures")

    def _apply(self, orders: Orders) -> None:
        """Raises ValueError, and changes nothing, when the orders are invalid."""
        credentials = [Credential.from_json(each) for each in orders.credentials]
        members = [Address(name, *parse_address(address)) for name, address in orders.members.items()]
        self._node.replace_credentials(credentials)
        self._peers.set_members(members, frozenset(orders.draining))
        refused = self._node.set_limits(*(TenantLimits(*each) for each in orders.tenants))
        self._node.counts.add("limits_refused", len(refused))
        if refused != self._refused:
            self._refused = refused
            for each in refused:
                log.error(
                    "the limits of tenant %s are not set: %d bytes guaranteed of %d, and this node has %d, less what "
                    "others are guaranteed", each.tenant, each.guarantee, each.quota, self._node.config.pool_bytes,
                )  # fmt: skip

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S + 1)
        self._client.close()


def _reason(answer: bytearray) -> str:
    """The control plane's reason for a refusal; empty when the answer is not from one."""
    try:
        return msgspec.json.decode(answer, type=_Refusal).error_msg[:_MAX_REASON]
    except (msgspec.MsgspecError, RecursionError):
        return ""


def one_line(error: Exception) -> str:
    """A failed HTTP call in one line; httpx's messages may have several, or none."""
    return str(error).partition("\n")[0] or type(error).__name__


def write_orders(path: Path, secret: bytes, orders: Orders) -> None:
    """Store orders in a file that only its owner can read, signed with the cluster's secret; never leaves a partial
    file.

    It holds verifiers of access keys, never keys. Raises OSError.
    """
    body = msgspec.json.encode(orders)
    write_private(path, _signature(secret, body) + body)


def read_orders(path: Path, secret: bytes) -> Orders | None:
    """The stored orders; None when there are none, or the cluster's secret did not sign them."""
    try:
        data = read_bytes(path)
        signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        return msgspec.json.decode(body, type=Orders) if same(signature, _signature(secret, body)) else None
    except (OSError, msgspec.MsgspecError):
        return None


def _signature(secret: bytes, body: bytes) -> bytes:
    return hmac.new(derive(secret, "kept orders"), body, hashlib.sha256).digest()
