"""Loading: opens a server's models one after the other, on a thread, while the server does other things."""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Progress, RankInfo
from kvloom.contract.tokenizer import Tokenizer
from kvloom.rank.opening import model_tokenizer
from kvloom.server.config.backends import factory_of
from kvloom.server.config.settings import ServerConfig
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.engine import Closing, EngineLike
from kvloom.server.serving.pictures.card import PictureCard

if TYPE_CHECKING:
    from kvloom.images.process import PictureProcess

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a server, as many as its configuration has."""

    models: Sequence[tuple[ModelCard, EngineLike, Tokenizer]]
    pictures: "Sequence[tuple[PictureCard, PictureProcess]]" = ()
    note: str = ""  # a line for the log behind the greeting


class Opening(Protocol):
    """Models being opened. `opened`: those so far. `close` ends them all, also before they are opened."""

    @property
    def models(self) -> Future[Loaded]: ...
    @property
    def opened(self) -> Sequence[Closing]: ...
    def close(self) -> None: ...


class Loading:
    """Starts at once. Models are opened one after the other, because the memory of each depends on the others."""

    def __init__(self, config: ServerConfig) -> None:
        self.opened: list[Closing] = []  # so far
        self.models: Future[Loaded] = Future()
        self.models.set_running_or_notify_cancel()  # callers that stop waiting cannot cancel it
        self._config, self._is_closing = config, False
        threading.Thread(target=self._run, name="loading", daemon=True).start()

    def close(self) -> None:
        """End everything that was opened. A process that is loading ends with this one, or when its model is loaded."""
        self._is_closing = True
        for each in self.opened:
            each.close()

    def _run(self) -> None:
        try:
            models: list[tuple[ModelCard, EngineLike, Tokenizer]] = []
            for card in self._config.models:
                promised = sum(promise_of(each.engine, engine.info) for each, engine, _ in models)
                later = [each.engine for each in self._config.models[len(models) + 1 :]]
                models.append(self._open(card, beside(card.engine, promised, later)))
            pictures = [(card, self._open_pictures(card)) for card in self._config.pictures]
            self.models.set_result(Loaded(models, pictures))
        except BaseException as error:  # callers that wait will raise it
            self.models.set_exception(error)

    def _keep(self, opened: Closing) -> None:
        self.opened.append(opened)
        if self._is_closing:
            opened.close()

    def _open_pictures(self, card: PictureCard) -> "PictureProcess":
        """Raises ModelError."""
        log.info("loading %s", card.name)
        setup = import_module("kvloom.images.messages").Setup(card.path, card.device, card.dtype, list(card.cores))
        painter = cast("PictureProcess", import_module("kvloom.images.process").PictureProcess(card.name, setup))
        self._keep(painter)
        return painter

    def _open(self, card: ModelCard, config: EngineConfig) -> tuple[ModelCard, EngineLike, Tokenizer]:
        """Raises ServingError."""
        load = functools.cache(functools.partial(model_tokenizer, config.model))
        with _bar(f"loading {card.name}") as progress:
            engine = factory_of(config.backend)(config, load, progress)
        self._keep(engine)
        wanted = card.engine.max_seq_len
        if wanted is not None and wanted > engine.max_seq_len:
            longest = engine.max_seq_len
            log.warning("maxSeqLen: %d is lowered to %d, the longest context of %s", wanted, longest, card.name)
        return card.advised(), engine, load()


def promise_of(config: EngineConfig, info: RankInfo) -> int:
    """Bytes of this machine's memory that the KV pools and states of an opened model may take: they get pages as they
    are used.
    """
    is_here = config.device == "cpu"
    states = (info.num_states + info.num_snapshots) * info.state_bytes
    return (info.kv_bytes + states if is_here else 0) + info.num_host_blocks * sum(info.block_bytes)


def beside(config: EngineConfig, promised_bytes: int, later: Sequence[EngineConfig]) -> EngineConfig:
    """`config` with what other models of the server take of this machine's memory: `promised_bytes` of those that were
    opened before, and, where its cache has an automatic size, room for the caches of `later` ones.
    """
    is_automatic = config.kv_cache_bytes is None and config.num_blocks is None
    here = [each for each in later if each.device == "cpu"] if is_automatic else []
    promised_bytes += sum((each.kv_cache_bytes or 0) + (each.host_cache_bytes or 0) for each in here)
    num_sharing = 1 + sum(each.kv_cache_bytes is None and each.num_blocks is None for each in here)
    return replace(config, promised_bytes=promised_bytes, num_sharing=num_sharing)


@contextlib.contextmanager
def _bar(text: str) -> Iterator[Progress]:
    """A progress bar; where there is no terminal, a line that says what is being done."""
    if not sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    bars: Any = import_module("kvloom.client.bars")
    with bars.bar(text) as progress:
        yield cast(Progress, progress)
