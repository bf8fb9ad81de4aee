"""Plan: what every process of a fleet is built from, wherever it runs. Made once, where the application is."""

import hashlib
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvloom.checkpoints.fingerprint import stamp
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import RankInfo
from kvloom.fleet.args import FleetArgs, check_args
from kvloom.rank.kernels.build import best_isa, cpu_flags, file_name, sums_of
from kvloom.server.config.backends import backend_of
from kvloom.server.config.given import check_given
from kvloom.server.config.settings import ServerConfig, Settings
from kvloom.server.run.launch import read_settings, resolve_model
from kvloom.server.run.names import check_names

_ELSE = "`kvloom fleet run` is a server that has it, or put one before this"
log = logging.getLogger(__name__)

_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "avx_vnni", "asimddp", "i8mm")


@dataclass(frozen=True, slots=True)
class Plan:
    """`values` are those of settings.Settings, with models by the names given: each node resolves them itself.
    num_sharing: replicas that share one machine's memory, where it is known that they do.
    """

    values: dict[str, Any]
    args: FleetArgs
    version: str
    world_size: int = 1  # ranks of a replica
    num_sharing: int = 1

    @property
    def id(self) -> str:
        """A digest that identifies this plan."""
        return hashlib.sha256(repr((self.values, self.args, self.version)).encode()).hexdigest()[:16]

    def config(self, node: str) -> ServerConfig:
        """The configuration on this node. Raises ModelError that names the node when a model is missing or kvloom's
        version differs.
        """
        own = version("kvloom")
        if own != self.version:
            raise ModelError(f"node {node} has kvloom {own}, and the fleet was deployed with {self.version}")
        settings = Settings({**self.values, "models": [dict(model) for model in self.values["models"]]})
        for model in settings.models:
            try:
                resolve_model(model, may_fetch=False)
            except ModelError as error:
                raise ModelError(f"node {node}: {error}") from None
        config = settings.build()
        return replace(config, models=tuple(replace(card, engine=self._own(card.engine)) for card in config.models))

    def _own(self, engine: EngineConfig) -> EngineConfig:
        """A replica's part of the machine's memory, and the mock's configured step times."""
        engine = replace(engine, num_sharing=self.num_sharing)
        mock = self.args.mock
        if mock is None or engine.backend != "fake":
            return engine
        return replace(engine, fake_step_s=mock.step_ms / 1e3, fake_token_s=mock.token_ms / 1e3)


def make_plan(args: FleetArgs, above: str = "args", is_behind_proxy: bool = True) -> Plan:
    """Raises BadRequest, also for options that a fleet does not serve. `is_behind_proxy`: HTTP comes through Ray's
    proxy; otherwise all replicas run on this machine.
    """
    check_args(args, above)
    for name, path in zip(args.__struct_fields__, args.__struct_encode_fields__, strict=True):
        check_given(f"{above}.{path}", name, getattr(args, name))  # fields have the settings' names
    settings = read_settings(Path(args.config) if args.config else None, os.environ)
    backend = None if args.backend is None else _backend(args.backend, f"{above}.backend")
    settings.override_model(model=args.model or None, name=args.name, backend=backend)
    settings.override_model(weight_format=args.weight_format)
    settings.override(max_seq_len=args.max_seq_len, max_batch=args.max_batch, num_blocks=args.num_blocks)
    settings.override(grace_s=args.grace_s, host=args.host, port=args.port)
    config = settings.build()
    if len(config.models) != 1 or config.pictures:
        raise BadRequest(f"{above}.config", "must name one language model: a fleet serves one, on many replicas")
    check_names(config)
    if is_behind_proxy and config.tls is not None:
        raise BadRequest(f"{above}.config", f"must not set httpsEnabled: Ray's proxy speaks HTTP; {_ELSE}")
    if is_behind_proxy and (config.management is not None or config.metrics is not None):
        raise BadRequest(
            f"{above}.config", f"must not set managementPort or metricsPort: Ray's proxy has one port; {_ELSE}"
        )
    if not is_behind_proxy and args.ingresses > 1:
        raise BadRequest(f"{above}.ingresses", "must be 1 here: this is one server; `serve deploy` has several")
    if args.mock is not None and config.models[0].engine.backend != "fake":
        raise BadRequest(f"{above}.mock", "is for the model without weights: set backend to mock")
    num_sharing = 1 if is_behind_proxy else args.most_replicas
    return Plan(settings.values, args, version("kvloom"), config.models[0].engine.world_size, num_sharing)


def _backend(name: str, path: str) -> str:
    """EngineConfig.backend of a name as `kvloom serve` takes it. Raises BadRequest that names `path`."""
    try:
        return backend_of(name)
    except BadRequest as error:
        raise BadRequest(path, error.problem) from None


def served_as(config: EngineConfig, adapters: Sequence[str]) -> str:
    """Equal where two replicas serve the same files; `adapters`: the digest of each, in order."""
    files = [f"{name}:{size}" for name, _, size, _ in stamp(config.model)]
    return hashlib.sha256(repr((files, list(adapters))).encode()).hexdigest()[:16]


def form_of(config: EngineConfig, info: RankInfo) -> str:
    """Equal where two replicas hold the same weights in the same form."""
    files = "+".join(f"{name}:{size}" for name, _, size, _ in stamp(config.model)) or "mock"
    held = f"{info.backend} {info.held_as}".strip()
    return f"{held} kv={config.kv_dtype} block={info.block_size} ranks={config.world_size} {files}"


def layout_of(form: str) -> str:
    """Equal where one replica can continue the other's answers: same form of weights, same order of additions."""
    if not form.startswith("cpu "):
        return f"{form} {_isa()}"
    isa = best_isa(cpu_flags())
    return f"{form} {file_name(isa)} {sums_of(isa)}"


def refusal(first: tuple[str, str], node: str, form: str) -> str:
    """Why this replica is refused, in a sentence, or "". `first`: node and form of the first replica of a plan."""
    first_node, wanted = first
    if form == wanted:
        return ""
    others = f"node {first_node} of the same fleet as {wanted}"
    return f"node {node} holds the model as {form}, and {others}; give both the same files, or set weightFormat"


def _isa() -> str:
    """The processor's instruction set, as far as it decides in which order foreign libraries add numbers."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.machine()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    flags = set(line.split())
    return "+".join([platform.machine(), *(flag for flag in _ISA_FLAGS if flag in flags)])
