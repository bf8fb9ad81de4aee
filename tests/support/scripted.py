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
    num_steps: int = 0  # that brought tokens of the answer
    num_written: int = 0  # tokens that these brought


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
        self._answers: dict[int, tuple[list[int], Turn]] = {}

    def _write(self, work: Work) -> None:
        self._begun.setdefault(work.id, work.start)
        super()._write(work)

    def _sample(self, work: Work, state: _State, output: StepOutput) -> None:
        """The next token; and the one after, as long as the draft is right."""
        if work.id not in self._answers:
            self._answers[work.id] = self._answer(work.id, state)
        answer, turn = self._answers[work.id]
        turn.num_steps += 1
        for guess in (*work.draft, None):
            at = len(state.token_ids) - state.num_prompt
            token_id = answer[at] if at < len(answer) else min(self._tokenizer.eos_ids)
            state.append(token_id)
            output.samples.append(Sample(work.id, token_id, None))
            turn.num_written += 1
            if token_id != guess or at >= len(answer):
                return

    def _answer(self, id: int, state: _State) -> tuple[list[int], Turn]:
        prompt = self._tokenizer.decode(state.token_ids[: state.num_prompt], skip_special_tokens=False)
        answer = self._script(prompt)
        turn = Turn(prompt, answer, state.num_prompt, self._begun[id])
        with self._turns.lock:
            self._turns.items.append(turn)
        return self._tokenizer.encode_inside(answer, is_plain=False), turn


@contextmanager
def scripted_server(
    tokenizer: Tokenizer, script: Script, max_len: int = 8192, token_s: float = 0.0, **more: Any
) -> Iterator[tuple[FakeServer, Turns]]:
    """A server with this vocabulary and chat template. `token_s`: how much longer each token makes a step."""
    turns = Turns()

    def make(config: EngineConfig) -> ScriptedRunner:
        shape = replace(config, max_seq_len=max_len, fake_token_s=token_s)
        return ScriptedRunner(shape, tokenizer, script, turns)

    with fake_server(tokenizer=tokenizer, max_seq_len=max_len, make_runner=make, **more) as server:
        yield server, turns
