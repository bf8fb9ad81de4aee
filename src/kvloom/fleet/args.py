"""FleetArgs: arguments of a fleet's application, from `args` of a fleet.yaml or from `kvloom fleet run`."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.reading import read_bytes

_MAX_BYTES = 10 << 20
_MAX_DEPTH = 64
_NOT_YAML = (ArithmeticError, AttributeError, LookupError, ValueError)  # PyYAML's, of a value that its tag does not fit
Kind = TypeVar("Kind")
_AT = re.compile(r" - at `\$(?P<path>.*)`\Z", re.DOTALL)
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]  # of replicas, as `kvloom simulate` has it
Amount = Annotated[float, msgspec.Meta(ge=0, le=10**9)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Scaling(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """Replicas between two bounds."""

    max_replicas: Count
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    up_delay_s: Amount = 5.0  # seconds that more replicas must be wanted before they are started
    down_delay_s: Amount = 300.0


class Autoscaling(Scaling, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """Scales so that each replica has about this many tokens of prompts queued."""

    queued_tokens_per_replica: Positive = 4096


class DecodeScaling(Scaling, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """Scales so that each replica has about this many requests: it decodes, whatever their prompts were."""

    requests_per_replica: Positive = 32


class Roles(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Replicas for prefills, and replicas for everything else; prompts of `threshold` tokens and more go to the
    former.
    """

    prefill: Count | Autoscaling
    decode: Count | DecodeScaling
    threshold: Positive = 1024


class RouterArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """See choice.Rules."""

    guard_factor: Annotated[float, msgspec.Meta(ge=1, le=10**9)] = 2.0
    guard_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 2048
    load_cost: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.15
    policy: str = "prefix"  # or power-of-two, Serve's own policy


class Mock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """Step times of the model without weights."""

    step_ms: Amount = 0.0
    token_ms: Amount = 0.0


class FleetArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """`config` is the path of a config.json; values given here override its own."""

    model: str = ""
    name: str | None = None
    config: str | None = None
    backend: str | None = None
    weight_format: str | None = None
    max_seq_len: Positive | None = None
    max_batch: Positive | None = None
    num_blocks: Positive | None = None
    replicas: Count | None = None  # default 1, unless roles or autoscaling set it
    autoscaling: Autoscaling | None = None
    roles: Roles | None = None
    ingresses: Count = 1
    cpus_per_rank: Amount = 1.0
    gpus_per_rank: Amount = 0.0
    router: RouterArgs = RouterArgs()
    patience_s: Amount = 120.0
    grace_s: Amount = 30.0
    kv_pool: bool = False  # an EMS agent on each node holds blocks for all replicas there; found or started
    kv_pool_gb: Annotated[float, msgspec.Meta(gt=0, le=10**9)] = 1.0  # memory of an agent that is started
    mock: Mock | None = None
    host: str | None = None  # these two: address of Ray's proxy, for `kvloom fleet run`
    port: Port | None = None

    @property
    def answering(self) -> int | Scaling:
        """The replicas that answer: their number, or how they are scaled."""
        return self.roles.decode if self.roles else self.autoscaling or self.replicas or 1

    @property
    def least_replicas(self) -> int:
        """How many of those run without any request."""
        return self.answering.min_replicas if isinstance(self.answering, Scaling) else self.answering

    @property
    def may_be_empty(self) -> bool:
        """Whether none of those runs without requests."""
        return self.least_replicas == 0

    @property
    def most_replicas(self) -> int:
        """The most replicas that may run at once, of all kinds."""
        kinds = (self.answering, self.roles.prefill if self.roles else 0)
        return sum(kind.max_replicas if isinstance(kind, Scaling) else kind for kind in kinds)


class HttpOptions(msgspec.Struct, frozen=True):
    """Those of Ray's http_options that a server of its own has."""

    host: str | None = None
    port: Port | None = None


def parse_args(given: Mapping[str, Any], above: str = "args") -> FleetArgs:
    """Raises BadRequest with the path of the wrong value; `above`: path of the arguments."""
    # `serve run IMPORT_PATH key=value` passes strings
    return _converted(given, FleetArgs, above, is_strict=False)


def _converted(given: Mapping[str, Any], kind: type[Kind], above: str, is_strict: bool) -> Kind:
    try:
        return msgspec.convert(dict(given), kind, strict=is_strict)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.search(text)
        path = above + (found["path"] if found else "")
        raise BadRequest(path, _small(text[: found.start()] if found else text)) from None


def check_args(args: FleetArgs, above: str) -> None:
    """Checks values that depend on each other. Raises BadRequest."""
    roles = {} if args.roles is None else {"roles.prefill": args.roles.prefill, "roles.decode": args.roles.decode}
    for path, scaling in {"autoscaling": args.autoscaling, **roles}.items():
        if isinstance(scaling, Scaling) and scaling.min_replicas > scaling.max_replicas:
            problem = f"must be at most maxReplicas, {scaling.max_replicas}, got {scaling.min_replicas}"
            raise BadRequest(f"{above}.{path}.minReplicas", problem)
    if args.roles is not None and args.autoscaling is not None:
        raise BadRequest(
            f"{above}.autoscaling",
            "is had by each role where there are roles: give roles.prefill and roles.decode a maxReplicas",
        )
    if args.replicas is not None and (args.roles is not None or args.autoscaling is not None):
        by = "roles" if args.roles is not None else "autoscaling"
        raise BadRequest(f"{above}.replicas", f"is not had together with {by}, which say how many there are")
    if args.roles is not None and not args.kv_pool:
        raise BadRequest(f"{above}.kvPool", "must be true with roles: blocks go from prefill to decode by EMS")
    if args.router.policy not in ("prefix", "power-of-two"):
        raise BadRequest(f"{above}.router.policy", f"must be prefix or power-of-two, got {args.router.policy!r}")


def read_fleet_file(path: Path) -> tuple[FleetArgs, HttpOptions]:
    """The arguments of the only application of a fleet.yaml, and its http_options. Raises BadRequest."""
    try:
        document = _decoded(read_bytes(path, _MAX_BYTES))
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    except ImportError:
        raise BadRequest(str(path), "needs PyYAML to be read: pip install 'kvloom[ray]'") from None
    except _NOT_YAML as error:
        raise BadRequest(str(path), f"is not valid YAML: {' '.join(str(error).split())}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not applications:
        raise BadRequest(f"{path}: applications", "must be a list of one application")
    if len(applications) > 1:
        raise BadRequest(f"{path}: applications[1]", "is one too many: a fleet is one application")
    application = applications[0]
    if not isinstance(application, dict) or application.get("import_path") != IMPORT_PATH:
        raise BadRequest(f"{path}: applications[0].import_path", f"must be {IMPORT_PATH}")
    given = application.get("args")
    if not isinstance(given, dict):
        raise BadRequest(f"{path}: applications[0].args", "must be an object")
    options = document.get("http_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest(f"{path}: http_options", "must be an object")
    listening = _converted(options or {}, HttpOptions, f"{path}: http_options", is_strict=True)
    return parse_args(given, f"{path}: applications[0].args"), listening


def _decoded(text: bytes) -> Any:
    """Whatever is nested deeper than _MAX_DEPTH is not built: libyaml's composer would end this process by it."""
    yaml = import_module("yaml")
    depth = 0
    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {_MAX_DEPTH}")
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return msgspec.yaml.decode(text)


IMPORT_PATH = "kvloom.fleet.app:build"


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]
