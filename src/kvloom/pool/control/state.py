"""ControlState: credentials, tenants and nodes of a cluster, in one SQLite file. The data path never waits for it."""

import re
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ems.keys import verifier
from kvloom.pool.control.members import ALIVE_S, LOST_S, Members
from kvloom.pool.node import NodeStats

ACCESS_ID = re.compile(r"[0-9a-z._-]{1,512}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS credentials (access_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, salt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS keys (access_id TEXT NOT NULL REFERENCES credentials ON DELETE CASCADE,
  verifier BLOB NOT NULL, expires_s REAL);
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, guarantee INTEGER NOT NULL, quota INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (node_id TEXT PRIMARY KEY, address TEXT NOT NULL, is_draining INTEGER NOT NULL,
  seen_s REAL NOT NULL, stats TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 0), passed_s REAL NOT NULL);
"""


class Conflict(Exception):
    """The name is taken."""


class Missing(Exception):
    """The name is unknown."""


class Heartbeat(msgspec.Struct):
    """A node's report: its address (host:port, empty = unreachable), its figures, and its agent's incarnation (empty =
    unknown).
    """

    address: str
    stats: NodeStats
    incarnation: str = ""


class Orders(msgspec.Struct):
    """Orders to a node. members: node id -> host:port; evict: (tenant, bytes) pairs, sent once."""

    credentials: list[dict[str, Any]]
    tenants: list[tuple[str, int, int]]
    members: dict[str, str]
    draining: list[str]
    evict: list[tuple[str, int]]


class ControlState:
    """May be called from any thread. `now` gives seconds since the epoch; `steady` those of a monotonic clock."""

    def __init__(
        self, path: Path | str, now: Callable[[], float], steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._steady = steady
        self._lock = threading.Lock()
        self._evict: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.executescript(_SCHEMA)
        ((last_s,),) = self._db.execute("SELECT max(seen_s) FROM nodes").fetchall()
        ((passed_s,),) = self._db.execute("SELECT max(passed_s) FROM clock").fetchall()
        self._behind_s = max(now(), passed_s or 0.0) - steady()
        self._ahead_s = (now() if last_s is None else last_s) - steady()
        last = self._db.execute("SELECT node_id FROM nodes WHERE seen_s >= ?", ((last_s or 0.0) - ALIVE_S,))
        self._members = Members((node_id for (node_id,) in last), steady())

    def _seen_s(self) -> float:
        """When a node is heard of, for the file: seconds of a clock that nobody sets, which stands still while no
        control plane runs.
        """
        return self._ahead_s + self._steady()

    def _passed_s(self) -> float:
        """Now, for the ends of keys: seconds since the epoch, of which none comes back when the clock is set back, also
        while no control plane runs.
        """
        return max(self._now(), self._behind_s + self._steady())

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def issue(self, access_id: str, tenant: str) -> str:
        """Makes a credential and returns its access key, which is kept nowhere. Raises Conflict."""
        access_key, salt = secrets.token_hex(32), secrets.token_bytes(16)
        with self._lock, self._db:
            try:
                self._db.execute("BEGIN")
                self._db.execute("INSERT INTO credentials VALUES (?, ?, ?)", (access_id, tenant, salt))
            except sqlite3.IntegrityError:
                raise Conflict(f"access_id {access_id} exists") from None
            self._db.execute("INSERT INTO keys VALUES (?, ?, NULL)", (access_id, verifier(access_key, salt)))
        return access_key

    def rotate(self, access_id: str, overlap_s: float) -> str:
        """A new access key; older ones are valid for `overlap_s` more seconds. Raises Missing."""
        access_key = secrets.token_hex(32)
        with self._lock, self._db:
            self._db.execute("BEGIN")
            row = self._db.execute("SELECT salt FROM credentials WHERE access_id = ?", (access_id,)).fetchone()
            if row is None:
                raise Missing(f"no access_id {access_id}")
            end_s = self._passed_s() + overlap_s
            self._db.execute(
                "UPDATE keys SET expires_s = min(?, coalesce(expires_s, ?)) WHERE access_id = ?",
                (end_s, end_s, access_id),
            )
            self._db.execute("INSERT INTO keys VALUES (?, ?, NULL)", (access_id, verifier(access_key, row[0])))
        return access_key

    def revoke(self, access_id: str) -> None:
        """Nodes end its sessions at their next heartbeat. Raises Missing."""
        with self._lock:
            done = self._db.execute("DELETE FROM credentials WHERE access_id = ?", (access_id,))
            if done.rowcount == 0:
                raise Missing(f"no access_id {access_id}")

    def credentials(self) -> list[dict[str, Any]]:
        """In the form of `Credential.to_json`: verifiers, never keys. Expired keys are gone."""
        with self._lock:
            self._end_keys()
            rows = self._db.execute("SELECT access_id, tenant, salt FROM credentials ORDER BY access_id").fetchall()
            keys: dict[str, list[str]] = defaultdict(list)
            for access_id, value in self._db.execute("SELECT access_id, verifier FROM keys ORDER BY rowid"):
                keys[access_id].append(value.hex())
        return [{"access_id": i, "tenant": t, "salt": salt.hex(), "verifiers": keys[i]} for i, t, salt in rows]

    def _end_keys(self) -> None:
        """Remove expired keys. While there are keys that will expire, the time is kept in the file."""
        passed_s = self._passed_s()
        self._db.execute("DELETE FROM keys WHERE expires_s <= ?", (passed_s,))
        if self._db.execute("SELECT 1 FROM keys WHERE expires_s IS NOT NULL LIMIT 1").fetchone() is not None:
            self._db.execute("INSERT OR REPLACE INTO clock VALUES (0, ?)", (passed_s,))

    def set_tenant(self, tenant: str, guarantee: int, quota: int) -> None:
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?, ?)", (tenant, guarantee, quota))

    def tenants(self) -> list[dict[str, Any]]:
        """Limits a node, and what the tenant uses on all nodes that are alive."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM tenants ORDER BY tenant").fetchall()
        used: dict[str, int] = defaultdict(int)
        for node in self.nodes():
            for pool in node["stats"].pools if node["is_alive"] else []:
                used[pool.tenant] += pool.usage.get("used_bytes", 0)
        limits = {tenant: (guarantee, quota) for tenant, guarantee, quota in rows}
        return [
            {
                "tenant": tenant,
                "guarantee_bytes": limits.get(tenant, (0, None))[0],
                "quota_bytes": limits.get(tenant, (0, None))[1],
                "used_bytes": used[tenant],
            }
            for tenant in sorted(limits.keys() | used.keys())
        ]

    def heartbeat(self, node_id: str, beat: Heartbeat) -> Orders:
        """Record a node's figures, and return its orders.

        Raises Conflict when an agent that started later uses the same id.
        """
        stats = msgspec.json.encode(beat.stats).decode()
        with self._lock:
            if not self._members.hear(node_id, beat.incarnation, self._steady()):
                row = self._db.execute("SELECT address FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
                address = row[0] if row is not None else ""  # no row: the disk was full when it was heard of
                raise Conflict(
                    f"the agent at {address or 'no address'} started later and calls itself {node_id} too; "
                    "give each its own --node-id"
                )
            self._db.execute(
                "INSERT INTO nodes VALUES (?, ?, 0, ?, ?) ON CONFLICT (node_id) DO UPDATE SET"
                " address = excluded.address, seen_s = excluded.seen_s, stats = excluded.stats",
                (node_id, beat.address, self._seen_s(), stats),
            )
            self._forget_earlier(node_id, beat.address)
            tenants = self._db.execute("SELECT * FROM tenants").fetchall()
        alive = [node for node in self.nodes() if node["is_alive"]]
        orders = Orders(
            credentials=self.credentials(),
            tenants=tenants,
            members={node["node_id"]: node["address"] for node in alive if node["address"]},
            draining=[node["node_id"] for node in alive if node["is_draining"]],
            evict=[],
        )
        with self._lock:  # last: what is taken here is sent
            orders.evict = self._evict.pop(node_id, [])
        return orders

    def _forget_earlier(self, node_id: str, address: str) -> None:
        """A dead node at this one's address was this one, under an id that it drew; one without an address may be back
        under another id at any time, so it is forgotten later. Nodes that are drained are kept.
        """
        others = self._db.execute(
            "SELECT node_id, address FROM nodes WHERE address IN (?, '') AND node_id <> ? AND NOT is_draining",
            (address, node_id),
        ).fetchall()
        for other, at in others:
            if not self._members.is_alive(other, self._steady(), ALIVE_S if at else LOST_S):
                self._db.execute("DELETE FROM nodes WHERE node_id = ?", (other,))
                self._members.forget(other)

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes ever heard of and not removed; `stats` as last reported."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM nodes ORDER BY node_id").fetchall()
            now_s = self._steady()
            alive = {row[0] for row in rows if self._members.is_alive(row[0], now_s)}
        return [
            {
                "node_id": node_id,
                "address": address,
                "is_draining": bool(is_draining),
                "is_alive": node_id in alive,
                "stats": msgspec.json.decode(stats, type=NodeStats),
            }
            for node_id, address, is_draining, _seen_s, stats in rows
        ]

    def drain(self, node_id: str, is_draining: bool) -> None:
        """Whether new blocks avoid the node. Raises Missing."""
        with self._lock:
            self._change("UPDATE nodes SET is_draining = ? WHERE node_id = ?", (is_draining, node_id), node_id)

    def remove_node(self, node_id: str) -> None:
        """Forgets a node, and what it was to do, until it is heard of again. Raises Missing."""
        with self._lock:
            self._change("DELETE FROM nodes WHERE node_id = ?", (node_id,), node_id)
            self._members.forget(node_id)
            self._evict.pop(node_id, None)

    def evict(self, node_id: str, tenant: str, size: int) -> None:
        """Make the node evict that many bytes of a tenant at its next heartbeat. Raises Missing."""
        with self._lock:
            self._change("UPDATE nodes SET node_id = node_id WHERE node_id = ?", (node_id,), node_id)
            self._evict[node_id].append((tenant, size))

    def _change(self, statement: str, values: tuple[str | bool, ...], node_id: str) -> None:
        """With the lock held."""
        if self._db.execute(statement, values).rowcount == 0:
            raise Missing(f"no node {node_id}")
