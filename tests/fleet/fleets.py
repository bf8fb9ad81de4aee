"""Replicas without Ray: mock engines of this process behind a FleetEngine's calls, which tests can kill."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from kvloom.contract.errors import Unavailable
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, FinishReason
from kvloom.fleet.engine import FleetEngine, Manners, Way, Ways
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.routing.board import Board, View
from kvloom.fleet.wire import About, Brought, Ended, Hello, decode_asked, decode_hint, encode, fault
from kvloom.rank.fake import VOCAB_SIZE, fake_answer
from tests.support.configs import mock_document

INFO = RankInfo(64, 16, VOCAB_SIZE, 256, "fake")


@dataclass
class Replicas:
    """Answers one token an item. The i-th call is lost after `dies_after[i]` tokens; -1: before it begins."""

    dies_after: list[int] = field(default_factory=list)
    serves: str = ""  # the model files that a replica serves
    layouts: list[str] = field(default_factory=list)  # of the replica that takes the i-th call
    refusals: list[Exception] = field(default_factory=list)  # of the first calls
    requests: list = field(default_factory=list)
    hints: list = field(default_factory=list)
    num_cancelled: int = 0
    is_silent: bool = False
    only_first: bool = False  # each call ends after its first token

    async def call(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        number = len(self.requests)
        self.requests.append(request := decode_asked(data).request)
        self.hints.append(decode_hint(hint))
        dies = self.dies_after[number] if number < len(self.dies_after) else None
        layout = self.layouts[number] if number < len(self.layouts) else "w8a8"
        try:
            if self.is_silent:
                await asyncio.Event().wait()
            if dies == -1:
                raise ReplicaLost("killed")
            yield encode(Hello(f"replica-{number}", layout, self.serves))
            if number < len(self.refusals):
                yield encode(fault(self.refusals[number]))
                return
            params, before = request.params, request.answer
            whole = fake_answer(request.prompt_ids, params, params.seed or 0, params.max_tokens)
            for index, token in enumerate(whole[len(before) :], len(before)):
                if dies is not None and index - len(before) >= dies:
                    raise ReplicaLost("killed")
                end = FinishReason.LENGTH if index + 1 == len(whole) else None
                delta = Delta(request.id, chr(token % 128), (token,), finish_reason=end)
                yield encode(Brought(index - len(before), [delta]))
                if self.only_first:
                    return
                await asyncio.sleep(0)
            yield encode(Ended(len(whole) - len(before)))
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            raise


def fleet_of(replicas: Replicas, prefill: Replicas | None = None, threshold: int = 0, **manners: float) -> FleetEngine:
    board = Board()
    board.views = [View("replica-0")]
    ways = Ways(Way(replicas.call, board), prefill and Way(prefill.call, Board()), threshold)
    return FleetEngine(About("replica-0", "w8a8", "1", "n", 1, 256, INFO), ways, Manners(**manners))


def with_missing_adapter(folder: Path) -> Path:
    """A config.json whose adapter no node has."""
    document = mock_document()
    document["ModelDeployParam"]["ModelParam"][0]["loraModules"] = ["a=/nowhere"]
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    return path


__all__ = ["INFO", "Replicas", "Unavailable", "fleet_of"]
