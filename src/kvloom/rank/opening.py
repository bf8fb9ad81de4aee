"""Opens an engine over rank processes, from the process that wants it.

The processes start first: while they import, this process imports what the engine needs.
"""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvloom.checkpoints.finding import is_assistant
from kvloom.contract.config import BACKENDS, MTP, EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Progress
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.link.ranks import RankExecutor
from kvloom.processes import kinds
from kvloom.rank.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from kvloom.engine.thread import EngineThread

log = logging.getLogger(__name__)


def open_ranks(
    config: EngineConfig, eos_ids: Callable[[], list[int]] = list, progress: Progress | None = None
) -> RankExecutor:
    """Start the ranks of `config` and wait until the model is loaded. Raises ModelError. See RankExecutor."""
    if config.backend not in BACKENDS:
        raise BadRequest("backend", f"must be auto, cpu, torch or mock here, got {config.backend!r}")
    return RankExecutor(kinds.RANK, config, eos_ids, progress)


def open_engine(
    config: EngineConfig, vocabulary: Callable[[], Tokenizer], progress: Progress | None = None
) -> "EngineThread":
    """Start a rank process, load the model in it, and run an engine thread over it. Raises ModelError.

    `vocabulary` is called while the process starts; `progress(done_bytes, total_bytes)` while weights are loaded.
    """
    vocabulary = functools.cache(vocabulary)
    check_draft_model(config, vocabulary)
    executor = open_ranks(config, lambda: sorted(vocabulary().eos_ids), progress)
    log.info("npuBlockNum: %d", executor.info.num_blocks)
    engine = import_module("kvloom.engine.engine").Engine(config, executor, vocabulary())
    return cast("EngineThread", import_module("kvloom.engine.thread").EngineThread(engine, executor))


def check_draft_model(config: EngineConfig, vocabulary: Callable[[], Tokenizer]) -> None:
    """Raises ModelError if there is a draft model and its vocabulary is another one. The files of an assistant need no
    tokenizer.
    """
    if config.draft_model not in ("", MTP) and not is_assistant(Path(config.draft_model)):
        same = import_module("kvloom.engine.text.same_tokens")
        same.check_same_tokens(vocabulary(), model_tokenizer(config.draft_model), config.draft_model)


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model's files; "" = of the model without weights. Raises ModelError."""
    if not model:
        return ByteTokenizer()
    return cast(Tokenizer, import_module("kvloom.engine.text.tokenizer").load_tokenizer(model))
