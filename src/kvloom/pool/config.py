"""AgentConfig: everything a node agent is told at start, checked once."""

import grp
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ems.common.sockets import DOCUMENTED_SOCKET
from kvloom.contract.numbers import whole
from kvloom.mistakes import problem_of
from kvloom.net.listening import is_loopback, is_unspecified
from kvloom.net.tlsconfig import TlsConfig
from kvloom.pool.storage.entries import Geometry
from kvloom.pool.storage.evict import ORDERS
from kvloom.reading import read_bytes

T = TypeVar("T")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MAX_PEER_CONNECTIONS = 16
_MIN_STAGING_BYTES = 64 << 20
NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,253}")  # it is part of the control plane's paths


def parse_size(text: str) -> int:
    """Bytes of "512", "64K", "16M", "2G" (powers of 1024). Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    number = whole(digits)
    if not number:
        raise ValueError(f"a size is a positive number, as 512, 64K, 16M or 2G, got {text!r}")
    return number * unit


def parse_count(text: str) -> int:
    """A positive number. Raises ValueError."""
    number = whole(text)
    if not number:
        raise ValueError(f"must be a positive number, got {text!r}")
    return number


def parse_mode(text: str) -> int:
    """Permissions of a socket in octal digits, as 660. Raises ValueError."""
    if not re.fullmatch("0?[0-7]{3}", text) or not int(text, 8) & 0o600:
        raise ValueError(f"permissions are three octal digits that let the owner read and write, as 660, got {text!r}")
    return int(text, 8)


def parse_group(text: str) -> int:
    """The number of a group by name or number. Raises ValueError."""
    try:
        return grp.getgrnam(text).gr_gid if (number := whole(text)) is None else number
    except KeyError:
        raise ValueError(f"this machine has no group {text!r}") from None


def is_host(text: str) -> bool:
    """Whether it is an IPv6 address, or has only characters that a name or an IPv4 address may have."""
    if re.fullmatch(r"[^][/\s:]+", text):
        return True
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ValueError."""
    written, _, port = text.rpartition(":")
    number = whole(port, 65535)
    host = written[1:-1] if written[:1] == "[" and written[-1:] == "]" else written
    if number is None or not is_host(host):
        raise ValueError(f"an address is host:port, got {text!r}")
    return host, number


def _is_site(url: str) -> bool:
    """Whether it is http or https with a host, and a port from 1 to 65535 if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # unbalanced brackets, or a port that is no number
        return False


def check_advertised(address: str) -> None:
    """Raises ValueError where other nodes could not call "host:port"."""
    host, port = parse_address(address)
    if not port or is_unspecified(host):
        raise ValueError(f"other nodes cannot call {address}; give an address of this node and its port")


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
        limits = cls(tenant, 0 if guarantee == "0" else parse_size(guarantee), parse_size(quota))
        if not tenant or limits.guarantee > limits.quota:
            raise ValueError(f"a tenant has a name, and a guarantee of at most its quota, got {text!r}")
        return limits


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens. id: unique in the cluster, decides which blocks have their home there."""

    id: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """From "id=host:port". Raises ValueError."""
        name, _, address = text.partition("=")
        if not name or not address:
            raise ValueError(f"a peer is id=host:port, got {text!r}")
        return cls(name, *parse_address(address))


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Raises ValueError naming the option when values do not fit together.

    pool_bytes: memory of all tenants; segment_bytes: one shared file; slab_bytes: the largest block.
    put_rate: bytes a second that each tenant may save, 0 = no limit.
    state: file where what the control plane said is kept for a restart without it.
    engine: URL of a distributed store behind this node.
    has_huge_pages: take the pool's memory from huge pages where there are some.
    snapshot_dir: folder that keeps the blocks between an orderly end and the next start.
    socket_mode, socket_group: who may connect: its permissions, and its group's number; -1 = the agent's own.
    max_sessions: connections of engines at once, and of callers who may be nodes; more wait. staging_bytes: for what
    sessions are saving, all together; 0 = a quarter of pool_bytes, 64 MiB at least.
    peer_connections: that one load from another node uses at most; 0 = 2 inside TLS, else 1.
    allowed_hosts: names, beside addresses and the machine's own, that `http` is asked under.
    tls: files for speaking with other nodes; without them nodes speak in plain text, beyond loopback only with
    has_plaintext_peers.
    secret: of the cluster, at least 32 bytes when peers or credentials are used; is_open: one tenant, no keys.
    """

    socket: Path = DOCUMENTED_SOCKET
    socket_mode: int = 0o660
    socket_group: int = -1
    pool_bytes: int = 1 << 30
    segment_bytes: int = 64 << 20
    slab_bytes: int = 16 << 20
    rcache_share: float = 0.25
    eviction: str = "s3fifo"
    put_rate: int = 0
    staging_bytes: int = 0
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
    peer_connections: int = 0
    control_url: str = ""
    state: Path | None = None
    tls: TlsConfig | None = None
    has_plaintext_peers: bool = False
    engine: str = ""
    engine_password: str = ""
    http: tuple[str, int] | None = None
    allowed_hosts: frozenset[str] = frozenset()
    ends_with_stdin: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.slab_bytes <= self.segment_bytes <= self.pool_bytes or self.slab_bytes % 4096:
            raise ValueError("--slab: at most --segment, which is at most --pool, and in whole pages of 4096 bytes")
        if 0 < self.staging_bytes < self.slab_bytes:
            raise ValueError("--staging: a block of --slab bytes must fit into it")
        if self.segment_bytes % self.slab_bytes:
            raise ValueError("--segment: must be a multiple of --slab")
        if not 0 <= self.peer_connections <= _MAX_PEER_CONNECTIONS:
            raise ValueError(f"--peer-connections: {_MAX_PEER_CONNECTIONS} at most, got {self.peer_connections}")
        if self.eviction not in ORDERS:
            raise ValueError(f"--eviction: {self.eviction!r} is none of {', '.join(ORDERS)}")
        if not 0 <= self.rcache_share <= 1:
            raise ValueError(f"--rcache: a share is a number from 0 to 1, got {self.rcache_share}")
        if (self.listen or self.peers or not self.is_open or self.control_url) and len(self.secret) < 32:
            raise ValueError(
                "--secret-file: other nodes, --credentials and --control need a secret of at least 32 bytes"
            )
        self._check_tls()
        self._check_cluster()
        if self.state is not None and not self.control_url:
            raise ValueError("--state: keeps what the control plane said; give --control too")
        if self.engine and self.peers:
            raise ValueError("--engine: does what other nodes do; give it or --peer")
        if self.is_direct and (self.engine or self.peers or self.control_url):
            raise ValueError("--direct: only on a node of its own; what engines write themselves goes to no other node")
        if self.is_direct and not self.is_open:
            raise ValueError(
                "--direct: only on a node with one tenant, which can change published bytes; leave out --credentials"
            )

    def _check_cluster(self) -> None:
        if not NODE_ID.fullmatch(self.node_id):
            raise ValueError(f"--node-id: 1 to 253 characters of A-Z a-z 0-9 . _ -, got {self.node_id!r}")
        names = [peer.id for peer in self.peers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"--peer: {twice} is there twice; every node has an id of its own")
        if self.control_url and not _is_site(self.control_url):
            raise ValueError(f"--control: an address as http://127.0.0.1:8081, got {self.control_url!r}")
        if self.advertise and not self.control_url:
            raise ValueError("--advertise: what the control plane tells other nodes; give --control too")
        if self.advertise:
            try:
                check_advertised(self.advertise)
            except ValueError as error:
                raise ValueError(f"--advertise: {error}") from None
        elif self.control_url and self.listen is not None and is_unspecified(self.listen[0]):
            raise ValueError(f"--advertise: --listen {self.listen[0]} is every address of this machine; "
                             "say under which host:port other nodes reach it")  # fmt: skip

    def _check_tls(self) -> None:
        if self.tls is not None and self.has_plaintext_peers:
            raise ValueError("--plaintext-peers: nodes speak TLS or plain text; give one of the two")
        if self.tls is not None and not (self.listen or self.peers or self.control_url):
            raise ValueError("--tls-dir, --tls-cert: for other nodes; give --listen, --peer or --control too")
        is_plain = self.tls is None and not self.has_plaintext_peers
        if self.listen is not None and is_plain and not is_loopback(self.listen[0]):
            raise ValueError(f"--listen: on {self.listen[0]} other machines would read and write blocks unencrypted; "
                             "give --tls-dir, or --plaintext-peers where the network is trusted")  # fmt: skip

    @property
    def max_staging_bytes(self) -> int:
        """For all sessions together; room for one block of each size at least."""
        return self.staging_bytes or max(_MIN_STAGING_BYTES, self.pool_bytes // 4, self.slab_bytes)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.segment_bytes, self.slab_bytes, self.has_huge_pages, is_sealed=not self.is_direct)


def read_secret(path: Path) -> bytes:
    """The cluster secret from a file of at least 32 bytes, surrounding blanks removed. Raises ValueError."""
    secret = read_option("--secret-file", path, read_bytes).strip()
    if len(secret) < 32:
        raise ValueError(f"--secret-file: {path}: the cluster secret must have at least 32 bytes")
    return secret


def read_option(option: str, path: Path, read: Callable[[Path], T]) -> T:
    """What `read` reads of the file of an option. Raises ValueError, which names the option."""
    try:
        return read(path)
    except UnicodeDecodeError:
        raise ValueError(f"{option}: {path} is not text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {problem_of(error) or error}") from None
