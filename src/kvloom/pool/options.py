"""The command line of the node agent: its options, and the AgentConfig they make."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ems.common.sockets import serving_path
from kvloom.limits import memory_bytes
from kvloom.net.sites import checked_hosts
from kvloom.pool.cluster.tls_options import tls_from
from kvloom.pool.config import (
    Address,
    AgentConfig,
    TenantLimits,
    parse_address,
    parse_count,
    parse_group,
    parse_mode,
    parse_size,
    read_option,
    read_secret,
)
from kvloom.pool.storage.evict import ORDERS
from kvloom.reading import read_text

T = TypeVar("T")


def read_by(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """`parse` as the parser of an option; its ValueError is shown to the user. A default is parsed already."""

    def convert(value: Any) -> T:
        try:
            parsed: T = parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return parsed

    return convert


def _pool_bytes(text: str) -> int:
    size, memory = parse_size(text), memory_bytes()
    if size > memory:
        raise ValueError(f"{size} bytes are more than the {memory} of this machine or container")
    return size


def _order(text: str) -> str:
    if text not in ORDERS:
        raise ValueError(f"{text!r} is none of {', '.join(ORDERS)}")
    return text


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a share is a number from 0 to 1, got {text!r}") from None


def _option(panel: str, name: str, text: str, parse: Callable[[str], Any] = str, default: str = "") -> Any:
    """An option with a value. default: for people."""
    kind = _KINDS.get(parse, "TEXT")
    shown = default or False
    return typer.Option(name, help=text, metavar=kind, parser=read_by(parse), show_default=shown, rich_help_panel=panel)


def _flag(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False, rich_help_panel=panel)


_KINDS: dict[Callable[[str], Any], str] = {
    _pool_bytes: "SIZE",
    parse_size: "SIZE",
    parse_count: "COUNT",
    parse_address: "HOST:PORT",
    Path: "PATH",
}

_memory, _memory_flag = (partial(each, "Memory") for each in (_option, _flag))
Pool = Annotated[int, _memory("--pool", "memory of all tenants, as 16G", _pool_bytes, "1G")]
Segment = Annotated[int, _memory("--segment", "size of one shared file", parse_size, "64M")]
Slab = Annotated[int, _memory("--slab", "size of the largest block", parse_size, "16M")]
Staging = Annotated[int, _memory("--staging", "memory for what is being saved", parse_size, "pool / 4, 64M at least")]
Rcache = Annotated[
    float | None, _memory("--rcache", "share of a quota for others' blocks", _share, "0.25; 1 with --engine")
]
Eviction = Annotated[str, _memory("--eviction", f"which blocks go first: {' or '.join(ORDERS)}", _order, "s3fifo")]
SnapshotDir = Annotated[Path | None, _memory("--snapshot-dir", "keeps the blocks over an orderly restart", Path)]
NoPrefault = Annotated[bool, _memory_flag("--no-prefault", "take memory when it is first used, not at the start")]
HugePages = Annotated[bool, _memory_flag("--huge-pages", "of huge pages; where there are none, of ordinary ones")]

_engines, _engines_flag = (partial(each, "Engines of this node") for each in (_option, _flag))
Socket = Annotated[Path | None, _engines("--socket", "Unix socket for engines", Path, "where the SDK looks")]
SocketMode = Annotated[int, _engines("--socket-mode", "its permissions", parse_mode, "660")]
SocketGroup = Annotated[int, _engines("--socket-group", "group that may connect, by name or number", parse_group)]
MaxSessions = Annotated[int, _engines("--max-sessions", "connections at once; more wait", parse_count, "256")]
PutRate = Annotated[int, _engines("--put-rate", "bytes a second that each tenant may save, as 500M", parse_size)]
Credentials = Annotated[Path | None, _engines("--credentials", "of `kvloom pool credentials`; without: open", Path)]
Tenants = Annotated[
    list[TenantLimits] | None, _engines("--tenant", "id:guarantee:quota; may be repeated", TenantLimits.parse)
]
Http = Annotated[Any, _engines("--http", "serves /healthz and /metrics", parse_address)]
AllowedHosts = Annotated[list[str] | None, _engines("--allowed-host", "name that --http is asked under; repeatable")]
Direct = Annotated[bool, _engines_flag("--direct", "engines write into the pool themselves (trusted node)")]

_nodes, _nodes_flag = (partial(each, "Other nodes") for each in (_option, _flag))
SecretFile = Annotated[Path | None, _nodes("--secret-file", "with the cluster's secret, 32 bytes or more", Path)]
NodeId = Annotated[str, _nodes("--node-id", "name of this node in the cluster", default="random")]
Listen = Annotated[Any, _nodes("--listen", "for other nodes; port 0 takes a free one", parse_address)]
Advertise = Annotated[str, _nodes("--advertise", "host:port under which other nodes reach this one")]
Control = Annotated[str, _nodes("--control", "URL of the control plane; the secret is the node's password")]
State = Annotated[Path | None, _nodes("--state", "keeps what the control plane said, for a restart without it", Path)]
Peers = Annotated[list[Address] | None, _nodes("--peer", "id=host:port of another node; repeatable", Address.parse)]
PeerConnections = Annotated[
    int, _nodes("--peer-connections", "for one load from a node", parse_count, "2 with TLS, else 1")
]
Engine = Annotated[str, _nodes("--engine", "URL of a distributed store: valkey://, unix://, mooncake://")]
EnginePassword = Annotated[Path | None, _nodes("--engine-password-file", "with the store's password", Path)]

_TLS = "TLS between nodes: a folder, or the files; SIGHUP reads them again"
_tls, _tls_flag = (partial(each, _TLS) for each in (_option, _flag))
TlsDir = Annotated[Path | None, _tls("--tls-dir", "laid out as `kvloom cert dev DIR` does, its key encrypted", Path)]
TlsCa = Annotated[list[Path] | None, _tls("--tls-ca", "certificate of a CA of the nodes; repeatable", Path)]
TlsCert = Annotated[Path | None, _tls("--tls-cert", "this node's certificate, for servers and clients", Path)]
TlsKey = Annotated[Path | None, _tls("--tls-key", "its key, not encrypted, mode 0640 at most", Path)]
TlsCrl = Annotated[Path | None, _tls("--tls-crl", "file with a revocation list of each CA", Path)]
PlaintextPeers = Annotated[bool, _tls_flag("--plaintext-peers", "listen for nodes beyond loopback without TLS")]

EndsWithStdin = Annotated[
    bool,
    typer.Option(
        "--ends-with-stdin",
        help="stop when standard input is closed, and remove the socket's folder if it is empty then",
    ),
]


def parse(  # for typer; config_from reads the values from its context
    context: typer.Context,
    pool_bytes: Pool = 1 << 30,
    segment_bytes: Segment = 64 << 20,
    slab_bytes: Slab = 16 << 20,
    staging_bytes: Staging = 0,
    rcache_share: Rcache = None,
    eviction: Eviction = "s3fifo",
    snapshot_dir: SnapshotDir = None,
    has_no_prefault: NoPrefault = False,
    has_huge_pages: HugePages = False,
    socket: Socket = None,
    socket_mode: SocketMode = 0o660,
    socket_group: SocketGroup = -1,
    max_sessions: MaxSessions = 256,
    put_rate: PutRate = 0,
    credentials: Credentials = None,
    tenants: Tenants = None,
    http: Http = None,
    allowed_hosts: AllowedHosts = None,
    is_direct: Direct = False,
    secret_file: SecretFile = None,
    node_id: NodeId = "",
    listen: Listen = None,
    advertise: Advertise = "",
    control_url: Control = "",
    state: State = None,
    peers: Peers = None,
    peer_connections: PeerConnections = 0,
    engine: Engine = "",
    engine_password_file: EnginePassword = None,
    tls_dir: TlsDir = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_crl: TlsCrl = None,
    has_plaintext_peers: PlaintextPeers = False,
    ends_with_stdin: EndsWithStdin = False,
) -> AgentConfig:
    """Serve this node's share of the KV pool."""
    return config_from(context.params)


def config_from(given: Mapping[str, Any]) -> AgentConfig:
    """The configuration that parsed options make, named as the parameters of `parse`. Raises OSError or ValueError."""
    fields = {name: value for name, value in given.items() if value is not None}
    tls = tls_from({name: fields.pop(name) for name in list(fields) if name.startswith("tls_")})
    secret_file, password_file = fields.pop("secret_file", None), fields.pop("engine_password_file", None)
    slab_bytes = min(fields["slab_bytes"], fields["segment_bytes"], fields["pool_bytes"])
    segment_bytes = min(fields["segment_bytes"], fields["pool_bytes"]) // slab_bytes * slab_bytes
    made = {
        "slab_bytes": slab_bytes,
        "segment_bytes": segment_bytes,
        "is_prefaulted": not fields.pop("has_no_prefault"),
        "is_open": "credentials" not in fields and not fields["control_url"],
        "tenants": tuple(fields.get("tenants", ())),
        "allowed_hosts": checked_hosts(fields.get("allowed_hosts", ())),
        "secret": read_secret(secret_file) if secret_file else b"",
        "peers": tuple(fields.get("peers", ())),
        "engine_password": read_option("--engine-password-file", password_file, read_text).strip()
        if password_file
        else "",
        "tls": tls,
    }
    if not fields["node_id"]:
        del fields["node_id"]  # AgentConfig draws one
    defaults = {"socket": serving_path(), "rcache_share": 1.0 if fields["engine"] else 0.25}
    return AgentConfig(**{**defaults, **fields, **made})
