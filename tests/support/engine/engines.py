"""Engines over the fake model, in this process."""

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Runner
from kvloom.contract.request import Delta, Request
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor, max_submitted
from kvloom.rank.fake import ByteTokenizer, FakeRunner


def fake_runner(num_blocks: int, block_size: int, max_seq_len: int = 2048, num_host_blocks: int = 0) -> FakeRunner:
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_host_blocks": num_host_blocks}
    return FakeRunner(EngineConfig(backend="fake", max_seq_len=max_seq_len, **sizes))


def fake_engine(
    num_blocks: int = 64, block_size: int = 4, max_seq_len: int = 64, num_host_blocks: int = 0, **config: object
) -> Engine:
    """An engine whose answers `fake_answer` computes."""
    return engine_over(fake_runner(num_blocks, block_size, max_seq_len, num_host_blocks), **config)


def engine_over(runner: Runner, **config: object) -> Engine:
    """An engine over the fake model of `runner`. Unless `config` says otherwise it plans steps ahead.

    It guesses only where `config` says so, because what pays depends on the time that steps take.
    """
    sizes = EngineConfig(**{"backend": "fake", "num_speculative_tokens": 0, **config})
    return Engine(sizes, in_process(runner, sizes), ByteTokenizer())


def in_process(runner: Runner, config: EngineConfig) -> InProcessExecutor:
    """An executor in this process that takes as many steps at once as rank processes do."""
    return InProcessExecutor(runner, max_submitted(config))


def run_all(engine: Engine, *requests: Request, max_steps: int = 10_000) -> dict[str, list[Delta]]:
    """Adds the requests and steps until nothing is left, checking invariants after each step; deltas by request."""
    for request in requests:
        engine.add(request)
    return drain(engine, max_steps)


def drain(engine: Engine, max_steps: int = 10_000) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return found
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        engine.check()
    raise AssertionError(f"still working after {max_steps} steps")


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)
