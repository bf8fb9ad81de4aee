"""AgentConfig: everything a node agent is told at start, checked once."""

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvloom.pool.entries import Geometry
from kvloom.pool.evict import ORDERS

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_SOCKET = "/dev/shm/ems/ems.sock"
T = TypeVar("T")


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as the type of a command-line option; the user reads what its ValueError says."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse_size(text: str) -> int:
    """Bytes of "512", "64K", "16M", "2G" (powers of 1024). Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"a size is a positive number, as 512, 64K, 16M or 2G, got {text!r}")
    return int(digits) * unit


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is host:port, got {text!r}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bytes: `guarantee` is set aside for the tenant, `quota` is the most it may use."""

    tenant: str
    guarantee: int
    quota: int

    @classmethod
    def parse(cls, text: str) -> "TenantLimits":
        """From "tenant:guarantee:quota", sizes as in parse_size; guarantee may be 0. Raises ValueError."""
        if text.count(":") != 2:
            raise ValueError(f"a tenant's limits are id:guarantee:quota, got {text!r}")
        tenant, guarantee, quota = text.split(":")
        return cls(tenant, 0 if guarantee == "0" else parse_size(guarantee), parse_size(quota))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens. id: unique in the cluster, decides placement."""

    id: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """From "id=host:port". Raises ValueError."""
        name, _, place = text.partition("=")
        if not name or not place:
            raise ValueError(f"a peer is id=host:port, got {text!r}")
        return cls(name, *parse_address(place))


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Raises ValueError naming the field when values do not fit together.

    pool_bytes: memory of all tenants; segment_bytes: one shared file; slab_bytes: the largest block.
    put_rate: bytes a second that each tenant may save, 0 = no limit.
    state: file where what the control plane said is kept for a restart without it.
    engine: URL of a distributed store behind this node.
    has_huge_pages: take the pool's memory from huge pages where there are some.
    snapshot_dir: folder that keeps the blocks between an orderly end and the next start.
    secret: of the cluster, at least 32 bytes when peers or credentials are used; is_open: one tenant, no keys.
    """

    socket: Path = Path(DEFAULT_SOCKET)
    pool_bytes: int = 1 << 30
    segment_bytes: int = 64 << 20
    slab_bytes: int = 16 << 20
    rcache_share: float = 0.25
    eviction: str = "s3fifo"
    put_rate: int = 0
    max_arena_bytes: int = 256 << 20
    max_sessions: int = 256
    is_open: bool = True
    is_direct: bool = False
    is_prefaulted: bool = True
    has_huge_pages: bool = False
    snapshot_dir: Path | None = None
    credentials: Path | None = None
    tenants: tuple[TenantLimits, ...] = ()
    secret: bytes = b""
    node_id: str = field(default_factory=lambda: f"node-{secrets.token_hex(4)}")
    listen: tuple[str, int] | None = None
    advertise: str = ""
    peers: tuple[Address, ...] = ()
    control_url: str = ""
    state: Path | None = None
    engine: str = ""
    engine_password: str = ""
    http: tuple[str, int] | None = None
    ends_with_stdin: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.slab_bytes <= self.segment_bytes <= self.pool_bytes or self.slab_bytes % 4096:
            raise ValueError("need 0 < slab_bytes <= segment_bytes <= pool_bytes, slab_bytes in whole pages")
        if self.segment_bytes % self.slab_bytes:
            raise ValueError("segment_bytes must be a multiple of slab_bytes")
        if self.eviction not in ORDERS:
            raise ValueError(f"eviction: {self.eviction!r} is none of {', '.join(ORDERS)}")
        if not 0 <= self.rcache_share <= 1:
            raise ValueError("rcache_share must be 0 to 1")
        if (self.listen or self.peers or not self.is_open or self.control_url) and len(self.secret) < 32:
            raise ValueError("secret: peers, credentials and the control plane need one of at least 32 bytes")
        if self.state is not None and not self.control_url:
            raise ValueError("state: keeps what the control plane said; give control_url too")
        if self.engine and self.peers:
            raise ValueError("engine: takes the place of peers; give one of the two")
        if self.is_direct and (self.engine or self.peers or self.control_url):
            raise ValueError("is_direct: only on a node of its own; what is written in place goes to no other node")
        if self.is_direct and not self.is_open:
            raise ValueError("is_direct: only on a node with one tenant, which can change published bytes")

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.segment_bytes, self.slab_bytes, self.has_huge_pages)


def read_secret(path: str) -> bytes:
    """The cluster secret from a file of at least 32 bytes, surrounding blanks removed. Raises OSError or ValueError."""
    secret = Path(path).read_bytes().strip()
    if len(secret) < 32:
        raise ValueError(f"{path}: the cluster secret must have at least 32 bytes")
    return secret


def default_socket() -> Path:
    """Where an agent listens when nobody says: the seed's directory if it is ours to write, else the user's own."""
    folder = Path(DEFAULT_SOCKET).parent
    if os.access(folder, os.W_OK):
        return Path(DEFAULT_SOCKET)
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / "ems" / "ems.sock"
