"""Loading: turns a configuration into a ModelRunner: model, backend, and sizes of the KV pools."""

import functools
import importlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvloom.checkpoints import footprint
from kvloom.checkpoints.assistant import assistant_of
from kvloom.checkpoints.checkpoint import Checkpoint, open_checkpoint
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.guess_head import open_guess_head
from kvloom.checkpoints.source import naming
from kvloom.checkpoints.unread import told
from kvloom.checkpoints.windows import reach_of
from kvloom.contract.capacity import CacheShape, CapacityRequest, Machine, Pools, Windows, plan_pools
from kvloom.contract.config import MTP, EngineConfig
from kvloom.contract.errors import ModelError, OutOfMemory
from kvloom.contract.messages import Progress, RankInfo
from kvloom.contract.tokenizer import Tokenizer
from kvloom.limits import available_bytes
from kvloom.rank.assistant_drafter import AssistantDrafter, Projections
from kvloom.rank.drafter import Drafter
from kvloom.rank.facts import ModelFacts
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.head_drafter import HeadDrafter
from kvloom.rank.kernels.backend import Backend
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions, check_kernels
from kvloom.rank.kernels.file_table import FileTable
from kvloom.rank.kernels.kept import kept_weights
from kvloom.rank.kernels.packed import Packed
from kvloom.rank.machine import explain_oom
from kvloom.rank.parallel.shard import shard_spec
from kvloom.rank.runner import ModelRunner

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens a KV block on CPU and CUDA
_INSTALL = "torch, which is not installed; pip install 'kvloom[torch]'"


def open_runner(
    config: EngineConfig, eos_ids: list[int], progress: Progress, rank: int = 0, rendezvous: str = ""
) -> ModelRunner:
    """Load the model of `config` into the backend that it names; of several ranks, this one's part. Raises
    ServingError.
    """
    check_device(config.device)
    checkpoint, max_seq_len = open_files(config)
    spec = checkpoint.spec
    if checkpoint.unread and rank == 0:
        log.warning("%s: has %s", checkpoint.path, told(checkpoint.unread))
    with explain_oom(config.model):
        opened = _open_kernels(config, checkpoint, max_seq_len, progress) if _kernels_fit(config) else None
        if opened is None:
            opened = _open_reference(config, checkpoint, max_seq_len, progress, (rank, rendezvous))
        backend, pools = opened
        embedding, lacks = checkpoint.embedding, _lacks(checkpoint)
        sees = spec.sees_ahead, reach_of(spec) if pools.num_window_blocks else 0
        facts = ModelFacts(spec.vocab_size, max_seq_len, eos_ids, embedding, lacks, *sees, pools.num_snapshots)
        must_wait = config.world_size > 1 or spec.state_floats > 0  # no token is computed twice
        guides = Guides(functools.partial(_tokenizer, config.model), spec.vocab_size, must_wait)
        drafter = _open_drafter(config, checkpoint, backend)
        runner = ModelRunner(backend, facts, pools.num_host_blocks, guides, drafter)
        _tell_unswapped(config, runner.info)
        return runner


def open_files(config: EngineConfig) -> tuple[Checkpoint, int]:
    """The model's files, with those of its draft model if it has one, and the most tokens of a sequence. Raises
    ModelError.
    """
    whole = open_checkpoint(Path(config.model))
    if whole.spec.assists:
        raise ModelError(
            f"{config.model}: an assistant guesses for a Gemma 4 (draft_model), and answers nothing itself"
        )
    max_seq_len = min(whole.spec.max_seq_len, config.max_seq_len or whole.spec.max_seq_len)
    checkpoint = replace(whole, spec=whole.spec.served(max_seq_len))
    if not config.draft_model:
        return checkpoint, max_seq_len
    if not checkpoint.spec.has_logits or checkpoint.spec.sees_ahead:
        raise ModelError(f"draft_model: {config.model} generates no text, so nothing is guessed for it")
    if config.draft_model == MTP:
        with naming(checkpoint.path, "draft_model: "):
            return replace(checkpoint, draft=open_guess_head(checkpoint)), max_seq_len
    draft = open_checkpoint(Path(config.draft_model))
    if draft.spec.assists:
        with naming(draft.path, "draft_model: "):
            draft = assistant_of(whole, draft)
    if not draft.spec.has_logits or draft.spec.sees_ahead:
        raise ModelError(f"draft_model: {config.draft_model} generates no text")
    if draft.spec.state_floats:
        raise ModelError(f"draft_model: layers of {config.draft_model} keep states, which do not go back by themselves")
    draft = replace(draft, spec=draft.spec.served(min(draft.spec.max_seq_len, max_seq_len)))
    return replace(checkpoint, draft=draft), max_seq_len


def _draft_config(config: EngineConfig) -> EngineConfig:
    """As the draft model is loaded: in the bits of its file, because each pass reads all of it; a head of the model's
    own files in these or in the bits that were asked for.
    """
    if config.draft_model != MTP:
        return replace(config, model=config.draft_model, draft_model="", weight_format=footprint.STORED)
    is_asked = config.weight_format != "auto"
    return replace(config, draft_model="", weight_format=config.weight_format if is_asked else footprint.STORED)


def _open_drafter(config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> Drafter | None:
    """The draft model, in blocks beside those of `backend`. Raises ModelError."""
    if (draft := checkpoint.draft) is None:
        return None
    try:
        beside = _open_beside(_draft_config(config), draft, backend)
    except ModelError as error:
        raise ModelError(f"draft_model: {config.draft_model}: {error}") from error
    sizes = draft.spec.max_seq_len, checkpoint.spec.vocab_size
    if draft.spec.assists:
        table = FileTable(checkpoint.weights, "embed", checkpoint.spec.embed_scale)
        return AssistantDrafter(beside, *sizes, Projections.of(draft.weights, table))
    return HeadDrafter(beside, *sizes) if draft.spec.joins_states else Drafter(beside, *sizes)


def _open_beside(config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> Backend:
    """A backend of the same kind, with blocks of the same numbers and sizes. Raises ModelError. A head that guesses
    shares tables of `backend`, and is packed at each start: it is one layer. An assistant reads the keys of `backend`.
    """
    spec, weights = checkpoint.spec, checkpoint.weights
    num_window_blocks = backend.num_window_blocks if spec.assists else 0
    if backend.name == "cpu":
        formats = footprint.weight_format(config, spec, weights.form), footprint.kv_dtype(config, "cpu")
        lent = cast(CpuBackend, backend).lends if spec.joins_states else None
        packed = None if lent else _packed(config, checkpoint)
        options = CpuOptions(*formats, packed=packed, block_size=backend.block_size, num_states=0, lent=lent)
        if spec.assists:
            options = replace(options, keys_of=cast(CpuBackend, backend), num_window_blocks=num_window_blocks)
        return CpuBackend(spec, weights, backend.num_blocks, options)
    torch_backend = _torch_backend(_needs_torch(config))
    mesh = torch_backend.join_mesh(config, 0, "")
    options = torch_backend.options_of(config, backend.block_size, mesh, Pools(backend.num_blocks, 0))
    lender = backend if spec.joins_states or spec.assists else None
    options = replace(options, lender=lender, num_window_blocks=num_window_blocks)
    return cast(Backend, torch_backend.ReferenceBackend(spec, weights, backend.num_blocks, options))


def _lacks(checkpoint: Checkpoint) -> dict[str, str]:
    """See RankInfo."""
    spec, makes = checkpoint.spec, "labels texts" if checkpoint.embedding.labels else "makes embeddings"
    if spec.sees_ahead:
        why = "its tokens see those behind them"
        return {"generation": f"{why}, it {makes}", "kv_transfer": f"{why}, so no part of a prompt is kept"}
    return {} if spec.has_logits else {"generation": f"its checkpoint has no head for text, it {makes}"}


def _tell_unswapped(config: EngineConfig, info: RankInfo) -> None:
    """That nothing will be swapped out, if that was asked for: the host's memory has no room for a state."""
    asked = config.num_host_blocks or config.host_cache_bytes
    if asked and info.num_states and info.num_host_blocks <= info.state_host_blocks:
        log.warning(
            "%s: cpuMemSize has no room for a sequence with its state of %d bytes: preempted ones are computed again",
            *(config.model, info.state_bytes),
        )


def _tokenizer(model: str) -> Tokenizer:
    """The model's tokenizer, which a rank needs for grammars only. Raises ModelError."""
    return cast(Tokenizer, importlib.import_module("kvloom.engine.text.tokenizer").load_tokenizer(model))


def check_device(device: str) -> None:
    """Raises ModelError when there is no such device here: "cpu", "cuda", "npu", or one of several ("cuda:1")."""
    if device != "cpu":
        _torch_backend(f"device: {device} needs {_INSTALL}").check_device(device)


def check_sharing(config: EngineConfig, spec: DecoderSpec) -> None:
    """Raises ModelError when ranks cannot share the model."""
    shard_spec(spec, config.world_size)
    if config.world_size > 1 and config.kv_tier is not None and spec.recurrent:
        raise ModelError(
            f"{config.model}: its layers keep states, which several ranks (worldSize) do not save to a pool"
        )


def check_backend(config: EngineConfig, spec: DecoderSpec) -> str:
    """Raises ModelError when the backend of choose_backend needs something that is not installed."""
    backend = choose_backend(config, spec)
    if backend == "reference":
        _torch_backend(_needs_torch(config))
    return backend


def choose_backend(config: EngineConfig, spec: DecoderSpec) -> str:
    """The backend for a model of this shape: "cpu" or "reference"."""
    if config.backend != "auto":
        return config.backend
    if not _kernels_fit(config):
        return "reference"
    try:
        check_kernels(spec, footprint.kv_dtype(config, "cpu"))
    except ModelError:
        return "reference"
    return "cpu"


def _open_kernels(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Progress
) -> tuple[Backend, Pools] | None:
    """The CPU backend and its pools.

    None (and a log line) where the kernels are not available and were not asked for by name.
    """
    try:
        spec, size = checkpoint.spec, config.block_size or BLOCK_SIZE
        if size % BLOCK_SIZE:
            raise ModelError(f"block_size: the cpu backend has multiples of {BLOCK_SIZE}, got {size}")
        pools = pools_for(config, "cpu", checkpoint, max_seq_len, size)
        weight_format = footprint.weight_format(config, spec, checkpoint.weights.form)
        kv_dtype = footprint.kv_dtype(config, "cpu")
        backend = CpuBackend(
            spec,
            checkpoint.weights,
            pools.num_blocks,
            CpuOptions(
                weight_format,
                kv_dtype,
                packed=_packed(config, checkpoint),
                block_size=size,
                num_states=pools.num_places,
                num_window_blocks=pools.num_window_blocks,
            ),
            progress,
        )
    except ModelError as error:
        if config.backend == "cpu" or isinstance(error, OutOfMemory):
            raise
        _torch_backend(f"{error}; the other backend needs {_INSTALL}")
        log.warning("%s; the slower torch backend is used instead", error)
        return None
    return backend, pools


def _packed(config: EngineConfig, checkpoint: Checkpoint) -> Packed | None:
    """The cache of packed weights. Raises BadRequest."""
    try:
        kept = kept_weights(os.environ, config.weight_cache)
    except OSError as error:
        log.warning("packed weights are not kept: %s: %s", error.filename, error.strerror)
        return None
    return None if kept is None else Packed(kept, checkpoint.path, checkpoint.stamp)


def _open_reference(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Progress, seat: tuple[int, str]
) -> tuple[Backend, Pools]:
    """As _open_kernels. `seat`: the rank's number, and the file where the ranks meet."""
    spec, size = checkpoint.spec, config.block_size or BLOCK_SIZE
    check_sharing(config, spec)  # before torch is loaded or memory is taken
    torch_backend = _torch_backend(_needs_torch(config))
    mesh = torch_backend.join_mesh(config, *seat)
    pools = torch_backend.least_pools(pools_for(config, "reference", checkpoint, max_seq_len, size), mesh, config)
    options = torch_backend.options_of(config, size, mesh, pools)
    backend = torch_backend.ReferenceBackend(spec, checkpoint.weights, pools.num_blocks, options, progress)
    return backend, pools


def _torch_backend(otherwise: str) -> Any:
    """The module torch_backend. Raises ModelError, `otherwise`, where torch is not installed."""
    try:
        return importlib.import_module("kvloom.rank.torch_backend")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModelError(otherwise) from None


def _needs_torch(config: EngineConfig) -> str:
    """The sentence for users without torch."""
    if config.backend == "reference":
        return f"the torch backend needs {_INSTALL}"
    reason = "float32" if config.dtype == "float32" else "a model on several ranks"
    return f"{reason if config.device == 'cpu' else config.device} needs {_INSTALL}"


def _kernels_fit(config: EngineConfig) -> bool:
    if config.backend == "auto":
        return config.device == "cpu" and config.dtype != "float32" and config.world_size == 1
    return config.backend == "cpu"


def pools_for(config: EngineConfig, backend: str, checkpoint: Checkpoint, max_seq_len: int, block_size: int) -> Pools:
    """Sizes of both KV pools for the memory that is free now. Raises OutOfMemory."""
    wanted = CapacityRequest(
        config.num_blocks,
        config.kv_cache_bytes,
        config.num_host_blocks,
        config.host_cache_bytes,
        max_seq_len,
        config.max_batch,
        config.snapshot_share if config.enable_prefix_cache else 0.0,
    )
    shape = cache_shape(config, backend, checkpoint, max_seq_len, block_size)
    host_bytes = available_bytes(config.world_size, config.promised_bytes)
    is_shared = config.device == "cpu"
    free_bytes = host_bytes if is_shared else _torch_backend(_needs_torch(config)).device_bytes(config.device)
    machine = Machine(free_bytes, host_bytes, is_shared, config.num_sharing)
    return plan_pools(wanted, shape, machine, weight_bytes(config, backend, checkpoint))


def weight_bytes(config: EngineConfig, backend: str, checkpoint: Checkpoint) -> int:
    """Of a model, and of its draft model."""
    num_bytes = footprint.weight_bytes(config, backend, checkpoint.spec, checkpoint.weights.form)
    if (draft := checkpoint.draft) is not None:
        num_bytes += footprint.weight_bytes(_draft_config(config), backend, draft.spec, draft.weights.form)
    return num_bytes


def cache_shape(
    config: EngineConfig, backend: str, checkpoint: Checkpoint, max_seq_len: int, block_size: int
) -> CacheShape:
    """What sequences of at most `max_seq_len` tokens keep. A window's blocks are for models whose windows are shorter
    than that. With an outer tier some layers must have all tokens, because its blocks are those of these layers.
    """
    spec, draft = checkpoint.spec, checkpoint.draft
    token_bytes, reach = footprint.kv_token_bytes(config, backend, spec), reach_of(spec)
    beside = footprint.kv_token_bytes(config, backend, draft.spec) if draft is not None else 0
    window_bytes = footprint.window_token_bytes(config, backend, spec)
    has_windows = 0 < reach < max_seq_len and (config.kv_tier is None or window_bytes < token_bytes)
    windows = Windows(window_bytes, reach) if has_windows else None
    state_bytes = footprint.state_bytes(spec) // config.world_size
    return CacheShape(token_bytes, block_size, config.world_size, state_bytes, windows, beside)
