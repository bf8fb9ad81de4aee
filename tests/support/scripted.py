"""A server whose model answers by a script."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Sample, StepOutput, Work
from kvloom.contract.tokenizer import Tokenizer
from kvloom.rank.fake import FakeRunner, _State
from kvloom.rank.grammar.guides import Guides
from tests.support.servers import FakeServer, fake_server

_BLOCK_SIZE = 16
Script = Callable[[str], str]  # the prompt's text -> the answer


@dataclass(slots=True)
class Turn:
    """One answer: what it was asked, and what of it was in the prefix cache."""

    prompt: str
    answer: str
    num_tokens: int
    num_cached: int


@dataclass(slots=True)
class Turns:
    """All answers so far."""

    items: list[Turn] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)


class ScriptedRunner(FakeRunner):
    """Writes what the script says, token by token, and then the end."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, script: Script, turns: Turns) -> None:
        num_blocks = 2 * (config.max_seq_len or 0) // _BLOCK_SIZE
        sizes = replace(config, num_blocks=num_blocks, block_size=_BLOCK_SIZE)
        super().__init__(sizes, guides=Guides(lambda: tokenizer, tokenizer.vocab_size))
        self.info = msgspec.structs.replace(self.info, vocab_size=tokenizer.vocab_size)
        self._tokenizer, self._script, self._turns = tokenizer, script, turns
        self._begun: dict[int, int] = {}  # where the first step of a sequence began
        self._answers: dict[int, list[int]] = {}

    def _write(self, work: Work) -> None:
        self._begun.setdefault(work.id, work.start)
        super()._write(work)

    def _sample(self, work: Work, state: _State, output: StepOutput) -> None:
        if work.id not in self._answers:
            self._answers[work.id] = self._answer(work.id, state)
        answer, at = self._answers[work.id], len(state.token_ids) - state.num_prompt
        token_id = answer[at] if at < len(answer) else min(self._tokenizer.eos_ids)
        state.append(token_id)
        output.samples.append(Sample(work.id, token_id, None))

    def _answer(self, id: int, state: _State) -> list[int]:
        prompt = self._tokenizer.decode(state.token_ids[: state.num_prompt], skip_special_tokens=False)
        answer = self._script(prompt)
        with self._turns.lock:
            self._turns.items.append(Turn(prompt, answer, state.num_prompt, self._begun[id]))
        return self._tokenizer.encode_inside(answer, is_plain=False)


@contextmanager
def scripted_server(
    tokenizer: Tokenizer, script: Script, max_len: int = 8192, **more: Any
) -> Iterator[tuple[FakeServer, Turns]]:
    """A server with this vocabulary and chat template."""
    turns = Turns()

    def make(config: EngineConfig) -> ScriptedRunner:
        return ScriptedRunner(replace(config, max_seq_len=max_len), tokenizer, script, turns)

    with fake_server(tokenizer=tokenizer, max_seq_len=max_len, make_runner=make, **more) as server:
        yield server, turns
