"""The parts of vLLM that EMSConnector uses, with the names and signatures of vLLM 0.32.0."""

import importlib
import sys
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK_SIZE = 4
NUM_BLOCKS = 32


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024
    pass


class KVConnectorWorkerMetadata(ABC):  # noqa: B024
    pass


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        self._counter_cls, self.per_engine_labelvalues = metric_types["counter"], per_engine_labelvalues


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA(ABC):  # noqa: B024
    pass


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK_SIZE
    sliding_window: int | None = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec:
    sliding_window: int
    block_size: int = BLOCK_SIZE


class KVConnectorBase_V1(ABC):  # noqa: B024
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


def generate_block_hash_extra_keys(request: Any, start: int, end: int, mm_index: int) -> tuple[Any, int]:
    keys = [request.cache_salt] if request.cache_salt and start == 0 else []
    adapter = request.lora_request
    keys += [("lora", adapter.lora_name, adapter.lora_path)] if adapter is not None else []
    return tuple(keys) or None, mm_index


@contextmanager
def stubbed_vllm(rank: int = 0, world_size: int = 1) -> Iterator[ModuleType]:
    """The module ems.integration.vllm over the stub, as tensor rank `rank`."""
    group = SimpleNamespace(rank_in_group=rank, world_size=world_size)
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase_V1,
            "KVConnectorHandshakeMetadata": KVConnectorHandshakeMetadata,
            "KVConnectorMetadata": KVConnectorMetadata,
            "KVConnectorRole": KVConnectorRole,
            "KVConnectorTransferResults": KVConnectorTransferResults,
            "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
            "SupportsHMA": SupportsHMA,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": KVConnectorPromMetrics,
            "KVConnectorStats": KVConnectorStats,
        },
        "vllm.distributed.kv_events": {"BlockStored": SimpleNamespace},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group, "get_pp_group": lambda: alone},
        "vllm.v1.core.kv_cache_utils": {
            "generate_block_hash_extra_keys": generate_block_hash_extra_keys,
            "maybe_convert_block_hash": lambda block_hash: block_hash,
        },
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": FullAttentionSpec,
            "MLAAttentionSpec": MLAAttentionSpec,
            "SlidingWindowSpec": SlidingWindowSpec,
            "iter_layer_specs": lambda spec: (spec,),
        },
    }
    names = {".".join(name.split(".")[: i + 1]) for name in contents for i in range(len(name.split(".")))}
    before = {
        name: sys.modules.pop(name, None) for name in (*names, "ems.integration.vllm", "ems.integration.vllm_stats")
    }
    try:
        for name in names:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents.get(name, {}))
        yield importlib.import_module("ems.integration.vllm")
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def vllm_config(socket: str, **changes: Any) -> SimpleNamespace:
    """A VllmConfig with the fields that the connector reads. changes: `kv_role`, `policy`, `extra`, `mla`, `events`,
    or attributes.
    """
    role = changes.pop("kv_role", "kv_both")
    transfer = SimpleNamespace(
        kv_connector_extra_config={"socket": socket, "timeout_ms": 20_000, **changes.pop("extra", {})},
        is_kv_producer=role != "kv_consumer",
        is_kv_consumer=role != "kv_producer",
        kv_load_failure_policy=changes.pop("policy", "recompute"),
    )
    hf_config = SimpleNamespace(to_json_string=lambda use_diff: "{}", _commit_hash=None)
    model = SimpleNamespace(
        model="tiny",
        revision=None,
        hf_config=hf_config,
        dtype="float16",
        quantization=None,
        use_mla=changes.pop("mla", False),
    )
    fields = {
        "kv_transfer_config": transfer,
        "model_config": model,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "speculative_config": None,
        "kv_events_config": SimpleNamespace(enable_kv_cache_events=changes.pop("events", False)),
    }
    return SimpleNamespace(**{**fields, **changes})


def kv_cache_config(*specs: Any) -> SimpleNamespace:
    """Each of several specs has a group of two layers; without specs there is one group of full attention."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{2 * i}", f"layer{2 * i + 1}"])
        for i, spec in enumerate(specs or (FullAttentionSpec(),))
    ]
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups, hash_block_size=None)


@dataclass
class FakeRequest:
    """vLLM's Request, with the fields that connectors read."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's hashes of the full blocks."""
        return [bytes([i]) * 32 for i in range(self.num_tokens // BLOCK_SIZE)]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


Blocks = list[int] | tuple[list[int], ...]


def by_group(blocks: Blocks) -> tuple[list[int], ...]:
    """Blocks by group, as in vLLM; a list stands for the only group."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


@dataclass
class Step:
    """vLLM's SchedulerOutput, with the fields that connectors read."""

    new: list[tuple[FakeRequest, Blocks, int]] = field(default_factory=list)  # request, blocks, computed tokens
    running: dict[str, tuple[Blocks, int]] = field(default_factory=dict)  # id -> new blocks, computed tokens
    counts: dict[str, int] = field(default_factory=dict)  # id -> tokens of this step
    preempted: set[str] = field(default_factory=set)

    def output(self) -> SimpleNamespace:
        cached = SimpleNamespace(
            req_ids=list(self.running),
            resumed_req_ids=set(),
            new_block_ids=[by_group(blocks) if blocks else None for blocks, _ in self.running.values()],
            num_computed_tokens=[computed for _, computed in self.running.values()],
        )
        new = [
            SimpleNamespace(req_id=request.request_id, block_ids=by_group(blocks), num_computed_tokens=computed)
            for request, blocks, computed in self.new
        ]
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.counts,
            preempted_req_ids=self.preempted or None,
        )


def new_caches(seed: int, num_groups: int = 1) -> dict[str, torch.Tensor]:
    """Two layers of [2, blocks, block_size, heads, head_size] halves; groups of layers share the same memory."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, 2, 8)
    memory = [torch.randn(shape, generator=generator).half() for _ in range(2)]
    return {f"layer{i}": memory[i % 2] for i in range(2 * num_groups)}
