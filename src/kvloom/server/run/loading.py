"""Loading: opens a server's models one after the other, on a thread, while the server does other things."""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvloom.contract.messages import Progress
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
    """Starts at once. Models are opened one after the other, because each one's memory depends on what is free then."""

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
            models = [self._open(card) for card in self._config.models]
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

    def _open(self, card: ModelCard) -> tuple[ModelCard, EngineLike, Tokenizer]:
        """Raises ServingError."""
        load = functools.cache(functools.partial(model_tokenizer, card.engine.model))
        with _bar(f"loading {card.name}") as progress:
            engine = factory_of(card.engine.backend)(card.engine, load, progress)
        self._keep(engine)
        wanted = card.engine.max_seq_len
        if wanted is not None and wanted > engine.max_seq_len:
            longest = engine.max_seq_len
            log.warning("maxSeqLen: %d is lowered to %d, the longest context of %s", wanted, longest, card.name)
        return card.advised(), engine, load()


@contextlib.contextmanager
def _bar(text: str) -> Iterator[Progress]:
    """A progress bar, visible in a terminal only."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bars: Any = import_module("kvloom.client.bars")
    with bars.bar(text) as progress:
        yield cast(Progress, progress)
