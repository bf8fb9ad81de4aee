"""EMSConnector: vLLM's KV cache outlives its engine. A KVConnector V1, for vLLM 0.32.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "EMSConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "ems.integration.vllm", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"socket": "/run/ems/ems.sock"}}'

vLLM makes one object in its scheduler and one in each worker. Whole blocks travel between steps, so nothing happens
layer by layer; a block counts as present when all ranks have their part of it; whatever fails is computed. Layers that
see equally far back are of one kind, and have blocks of their own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs

from ems.integration.layers import Layers
from ems.integration.lookup import Lookup
from ems.integration.moving import Moving
from ems.integration.parts import BlockParts, split_blocks
from ems.integration.plan import Duties, Plan
from ems.integration.prefix import Kind, kinds_of
from ems.integration.scheduling import Scheduling
from ems.integration.settings import KindLayout, RankLayout, Settings, model_fingerprint
from ems.integration.stored import StoredBlock
from ems.integration.vllm_stats import EMSPromMetrics, EMSStats

MEDIUM = "EMS"  # medium of KV events
LAYERWISE = "kv_connector_extra_config.layerwise"


@dataclass
class EMSConnectorMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, once a step."""

    plan: Plan = field(default_factory=Plan)


@dataclass
class EMSWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, once a step. saved: hash -> number of ranks that have saved the block. staged:
    of layer-by-layer loads, how many blocks each rank has in host memory.
    """

    saved: Counter[int]
    staged: dict[int, list[int]]

    def aggregate(self, other: Any) -> "EMSWorkerMetadata":
        numbers = self.staged.keys() | other.staged.keys()
        staged = {number: self.staged.get(number, []) + other.staged.get(number, []) for number in numbers}
        return EMSWorkerMetadata(self.saved + other.saved, staged)


@dataclass
class EMSHandshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once."""

    layout: RankLayout


class EMSConnector(KVConnectorBase_V1, SupportsHMA):
    """Methods are vLLM's; see its KVConnectorBase_V1 for who calls them when."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ValueError naming the setting that does not fit."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config or {})
        _check(vllm_config)
        self._kinds = _kinds(kv_cache_config)
        is_mla = vllm_config.model_config.use_mla
        has_windows = any(kind.window is not None for kind in self._kinds)
        self._is_plain = len(kv_cache_config.kv_cache_groups) == 1 and not has_windows
        if self._settings.layerwise and (is_mla or not self._is_plain):
            raise ValueError(f"{LAYERWISE}: must be false for models with MLA, windows or several groups of layers")
        self._scheduling: Scheduling | None = None
        self._moving: Moving | None = None
        self._layers: Layers | None = None
        self._layout: RankLayout | None = None
        if role == KVConnectorRole.SCHEDULER:
            events = getattr(vllm_config, "kv_events_config", None)
            hash_size = kv_cache_config.hash_block_size or self._kinds[0].block_size
            has_events = events is not None and events.enable_kv_cache_events
            has_events = has_events and hash_size == self._kinds[0].block_size  # events name blocks by vLLM's hashes
            handover_s = self._settings.handover_ms / 1000
            duties = Duties(
                transfer.is_kv_consumer, transfer.is_kv_producer, has_events, handover_s, self._settings.layerwise
            )
            self._scheduling = Scheduling(self._kinds, _extra_keys, duties)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # it is a cache: what is not saved is computed again

    # In the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], EMSHandshake]) -> None:
        if self._scheduling is not None:
            layouts = [shake.layout for shake in metadata.values()]
            is_alike = layouts[0].is_mla  # with MLA all tensor-parallel ranks hold the same bytes
            savers = [one for one in layouts if one.rank_in_tp == 0 or not is_alike]
            self._scheduling.lookup = Lookup(self._settings, savers, self._kinds)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduling is not None
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduling is not None
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> EMSConnectorMetadata:
        assert self._scheduling is not None
        return EMSConnectorMetadata(self._scheduling.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduling is not None
        self._scheduling.loaded(
            connector_output.finished_recving or (), connector_output.invalid_block_ids, connector_output.failed_recving
        )
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduling.saved(connector_output.kv_connector_worker_meta.saved)
            self._scheduling.staged(connector_output.kv_connector_worker_meta.staged)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduling is not None
        return self._scheduling.finished(request)

    def take_events(self) -> Iterator[BlockStored]:
        """Blocks that are in the pool from now on, with all ranks' parts. Their eviction is not reported.

        Where layers are of several kinds, blocks of the first kind.
        """
        assert self._scheduling is not None
        return (_event(block, self._kinds[0]) for block in self._scheduling.take_stored())

    def reset_cache(self) -> bool | None:
        """vLLM's reset_prefix_cache(reset_connector=True): what was saved so far is not loaded any more."""
        if self._scheduling is None:
            return None
        self._scheduling.reset()
        return True

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        parts = [[self._split(kv_caches, group) for group in kind.groups] for kind in self._kinds]
        tp, pp = get_tp_group(), get_pp_group()
        self._layout = RankLayout(
            model_id=self._settings.model_id or _model_id(self._vllm_config),
            engine=f"vllm/{vllm.__version__}",
            is_mla=bool(self._vllm_config.model_config.use_mla),
            tp_world_size=tp.world_size,
            pp_world_size=pp.world_size,
            rank_in_tp=tp.rank_in_group,
            rank_in_pp=pp.rank_in_group,
            kinds=tuple(self._layout_of(kind, groups) for kind, groups in zip(self._kinds, parts, strict=True)),
        )
        caches = [[group.parts for group in kind] for kind in parts]
        self._moving = Moving(self._settings, self._layout, caches, self._is_plain)
        if self._settings.layerwise:
            self._layers = Layers(self._settings, self._layout, parts[0][0], self._moving.circuit)

    def _split(self, caches: dict[str, torch.Tensor], number: int) -> BlockParts:
        """The parts of one group of layers. Groups share the same memory, and each block belongs to one of them at a
        time.
        """
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) > 1:
            caches = {name: caches[name] for name in groups[number].layer_names if name in caches}
        if not caches:
            raise ValueError(f"pipeline_parallel_size: EMSConnector needs layers of group {number} in every stage")
        return split_blocks(caches, self._kv_cache_config.num_blocks)

    def _layout_of(self, kind: Kind, parts: list[BlockParts]) -> KindLayout:
        """The layout of a kind. With several groups, a block belongs to certain layers among all."""
        groups = self._kv_cache_config.kv_cache_groups
        about = [f"{one}{[groups[number].layer_names for number in one.groups]}" for one in self._kinds]
        which = [f"kind {self._kinds.index(kind)} of {about}"] if len(groups) > 1 else []
        arrangement = "|".join([str(kind.block_size), *which, *(part.arrangement for part in parts)])
        return KindLayout(arrangement, tuple(part.widths for part in parts))

    def get_handshake_metadata(self) -> EMSHandshake | None:
        return EMSHandshake(self._layout) if self._layout is not None else None

    def handle_preemptions(self, kv_connector_metadata: EMSConnectorMetadata) -> None:
        if self._moving is not None:
            self._moving.wait_for(kv_connector_metadata.plan.preempted, kv_connector_metadata.plan.overtaken)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata().plan
        if self._layers is not None and self._moving is not None:
            self._layers.stage(plan.stages)
            self._layers.drop(plan.dropped)  # one of these may be for a request that has just ended
            self._layers.load(plan.loads)
        elif self._moving is not None:
            if plan.is_reset:
                self._moving.forget_loads()
            self._moving.load(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for between steps: a request runs only when all its blocks are there."""
        if self._layers is not None:
            self._layers.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Otherwise blocks are saved whole, when the step has computed all their layers."""
        if self._layers is not None:
            self._layers.save_layer(layer_name, self._get_connector_metadata().plan.saves)

    def wait_for_save(self) -> None:
        if self._moving is None:
            return
        saves = self._get_connector_metadata().plan.saves
        if self._layers is not None:
            begun, saves = self._layers.end_step(saves)
            for transfer, future in begun:
                self._moving.adopt(transfer, future)
        self._moving.save(saves)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._moving is None:
            return KVConnectorTransferResults()
        reports = self._moving.reports(finished_req_ids)
        return KVConnectorTransferResults(reports.sent, reports.received, reports.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._moving.take_failed_blocks() if self._moving is not None else set()

    def build_connector_worker_meta(self) -> EMSWorkerMetadata | None:
        saved = self._moving.take_saved() if self._moving is not None else []
        staged = self._layers.take_staged() if self._layers is not None else {}
        by_rank = {number: [count] for number, count in staged.items()}
        return EMSWorkerMetadata(Counter(saved), by_rank) if saved or staged else None

    # In both

    def get_kv_connector_stats(self) -> EMSStats | None:
        part = self._moving or self._scheduling
        counts = part.take_counts() if part is not None else {}
        for name, value in self._layers.take_counts().items() if self._layers is not None else ():
            counts[name] = counts.get(name, 0) + value
        return EMSStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EMSStats:
        return EMSStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: Any
    ) -> EMSPromMetrics:
        return EMSPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for part in (self._layers, self._moving, self._scheduling):
            if part is not None:
                part.close()
        self._moving = self._scheduling = self._layers = None


def _check(config: Any) -> None:
    """Refuses configurations in which a block is not determined by the tokens up to its end."""
    parallel, speculative = config.parallel_config, config.speculative_config
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError('kv_load_failure_policy: EMSConnector needs "recompute", so that a miss is not an error')
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"{name}: EMSConnector needs 1")
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise ValueError(f"speculative_config.method: EMSConnector takes ngram or suffix, not {speculative.method}")


def _kinds(kv_cache_config: Any) -> tuple[Kind, ...]:
    """The kinds of attention of a model. Raises ValueError that names a layer whose state is not made of blocks of
    tokens.
    """
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
                kept = "full and sliding-window attention"
                kind = type(spec).__name__.removesuffix("Spec")
                raise ValueError(f"kv_cache_config: EMSConnector keeps {kept}, not {kind} ({group.layer_names[0]})")
            window = spec.sliding_window if type(spec) is SlidingWindowSpec else None
        groups.append((group.kv_cache_spec.block_size, window))
    return kinds_of(groups)


def _extra_keys(request: Any, start: int, end: int, mm_index: int) -> tuple[tuple[Any, ...] | None, int]:
    """As vLLM's, without name and path of an adapter: its content is in the chain's root."""
    keys, mm_index = generate_block_hash_extra_keys(request, start, end, mm_index)
    kept = tuple(key for key in keys or () if not (isinstance(key, tuple) and key[:1] == ("lora",)))
    return kept or None, mm_index


def _event(block: StoredBlock, kind: Kind) -> BlockStored:
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block.hash)],
        parent_block_hash=maybe_convert_block_hash(block.parent) if block.parent is not None else None,
        token_ids=list(block.tokens),
        block_size=kind.block_size,
        lora_id=None,
        medium=MEDIUM,
        lora_name=block.adapter,
        group_idx=kind.groups[0],
    )


def _model_id(config: Any) -> str:
    model = config.model_config
    facts = (
        vllm.__version__,
        model.revision,
        getattr(model.hf_config, "_commit_hash", None),
        model.hf_config.to_json_string(use_diff=False),
        str(model.dtype),
        model.quantization,
        config.cache_config.cache_dtype,
        config.device_config.device_type,
    )
    return model_fingerprint(model.model, facts)
