"""Heads that guess: what one guesses changes no answer, is what its formula says, and is right where the formula is."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.contract.config import MTP, EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import Request
from kvloom.engine.engine import Engine
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.head_drafter import READ_TOKENS, HeadDrafter
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.drafts import check_chained, draft_always
from tests.support.engine.engines import drain, engine_over, in_process, run_all, tokens_of
from tests.support.models.checkpoints import save, tiny_model
from tests.support.models.guess_heads import GuessHead, chained, save_with

from .test_draft_model import DRAFTS, KINDS, prompt, requests, told

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
NUM_CHAINED = 40
OWN = {"num_speculative_tokens": DRAFTS, "model": "m", "draft_model": MTP, "backend": "auto"}


@pytest.fixture(scope="module")
def heads() -> dict[str, GuessHead]:
    random = GuessHead("qwen3.5", **ROPE)
    return {
        "random": random,
        "chained": chained("qwen3.5", NUM_CHAINED, **ROPE),
        "moe": GuessHead("qwen3 next", **ROPE),
    }


@pytest.fixture(scope="module")
def folders(heads, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("heads")
    return {name: str(save_with(head, path / name)) for name, head in heads.items()}


def opened(folder: str, draft: str = MTP, backend: str = "cpu", **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    sizes = {"num_blocks": 40, "max_seq_len": 200, "num_speculative_tokens": DRAFTS, **fields}
    config = EngineConfig(model=folder, draft_model=draft, backend=backend, **sizes)
    return open_runner(config, [100], lambda done, total: None)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Whatever it costs, all that the head guesses is drafted. Returns what an engine needs for it."""
    draft_always(monkeypatch)
    return dict(OWN)


def noted(runner: ModelRunner) -> list[tuple[list[int], list[int]]]:
    """What the runner drafts from now on, each behind a text."""
    found: list[tuple[list[int], list[int]]] = []
    own = runner.run

    def run(batch: Batch) -> StepOutput:
        texts = {id: list(state.history.token_ids) for id, state in runner._states.items()}
        output = own(batch)
        found.extend((texts[one.id], one.token_ids) for one in output.drafts)
        return output

    runner.run = run  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("name", "backend"), [("random", "cpu"), ("chained", "cpu"), ("moe", "cpu"), ("random", "reference")]
)
def test_answers_are_those_without_the_head(folders, name, backend, drafting):
    """In float32 of torch numbers differ in their last digits from shape to shape: there tokens are compared."""
    parts = slice(None) if backend == "cpu" else slice(1)
    want = told(run_all(engine_over(opened(folders[name], "", backend)), *requests()), parts)
    engine = engine_over(opened(folders[name], MTP, backend), **drafting)
    assert told(run_all(engine, *requests()), parts) == want
    assert engine.stats().total_draft_tokens > 0


@pytest.mark.parametrize("fields", [{}, {"max_tokens_per_step": 7, "max_batch": 4}, {"run_ahead": False}])
def test_it_guesses_what_its_formula_says(heads, folders, drafting, fields):
    """Behind prompts that were computed at once or in chunks, and behind guesses that were right or wrong."""
    runner = opened(folders["random"], backend="reference")
    drafts = noted(runner)
    engine = engine_over(runner, **drafting, **fields)
    run_all(engine, Request("a", prompt(23), KINDS[0]), Request("b", prompt(40, 5), KINDS[5]))
    assert len(drafts) > 10
    for text, draft in drafts:
        assert draft == heads["random"].guesses(text, DRAFTS)[: len(draft)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_head_that_looks_at_states_alone_is_always_right(folders, backend, drafting):
    check_chained(engine_over(opened(folders["chained"], backend=backend), **drafting), KINDS[0])


def test_it_reads_answers_along_without_drafting(folders):
    """So that it can begin at any time: less than READ_TOKENS are lacking."""
    runner = opened(folders["random"])
    engine = engine_over(runner)
    engine.add(Request("a", prompt(50), KINDS[0]))
    drafter, lacking = runner._drafter, []
    assert isinstance(drafter, HeadDrafter)
    while engine.has_work:
        engine.step()
        for seq in drafter._seqs.values():
            lacking.append(len(seq.text) - seq.num_known)
    assert len(lacking) > READ_TOKENS
    assert max(lacking) <= READ_TOKENS + 1


@pytest.mark.parametrize("fields", [{"max_preempt": None}, {"run_ahead": False}])
@pytest.mark.parametrize("name", ["random", "chained"])
def test_preemption_and_the_schedule_change_no_answer(folders, drafting, name, fields):
    want = told(run_all(engine_over(opened(folders[name], "")), *requests()))
    engine = engine_over(opened(folders[name], num_blocks=14), **drafting, **fields)
    assert told(run_all(engine, *requests())) == want
    assert engine.stats().total_preemptions > 0


def test_answers_go_on_after_a_crash(folders, drafting):
    want = {id: one[0] for id, one in told(run_all(engine_over(opened(folders["random"], "")), *requests())).items()}
    engine = engine_over(opened(folders["random"]), **drafting)
    found: dict[str, list[int]] = {id: [] for id in want}
    for request in requests():
        engine.add(request)
    for _ in range(5):
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    engine._executor = in_process(opened(folders["random"]), engine.config)
    for delta in (*engine.suspend(), *engine.resume({})):
        found[delta.request_id] += delta.token_ids
    for id, deltas in drain(engine).items():
        found[id] += tokens_of(deltas)
    assert found == want


@pytest.fixture(scope="module")
def runners(folders) -> dict[str, ModelRunner]:
    return {"off": opened(folders["random"], ""), "on": opened(folders["random"])}


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_blocks=st.integers(8, 30),
    max_tokens=st.integers(8, 60),
    kind=st.sampled_from(KINDS[:4]),
    run_ahead=st.booleans(),
)
def test_no_schedule_changes_an_answer(runners, lengths, num_blocks, max_tokens, kind, run_ahead):
    """Each runner keeps what earlier engines have left in its blocks. Prompts begin alike, so prefixes are found."""
    asked = [Request(f"r{i}", prompt(length, 5 * i % 2), kind) for i, length in enumerate(lengths)]
    want = told(run_all(engine_over(runners["off"]), *asked))
    config = EngineConfig(**OWN, max_batch=4, max_tokens_per_step=max_tokens, run_ahead=run_ahead)
    executor = in_process(runners["on"], config)
    executor.info = structs.replace(executor.info, num_blocks=num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        draft_always(patch)
        assert told(run_all(Engine(config, executor, ByteTokenizer()), *asked)) == want


# -- what is told and refused


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_its_memory_is_planned_and_taken_only_where_it_guesses(folders, backend):
    budget = {"num_blocks": None, "kv_cache_bytes": 1 << 20, "backend": backend}
    plain, own = opened(folders["random"], "", **budget).info, opened(folders["random"], **budget).info
    assert plain.draft_bytes == (0, 0)
    weights, kept = own.draft_bytes
    assert 0 < weights < own.weight_bytes == plain.weight_bytes
    assert own.num_blocks < plain.num_blocks
    assert own.kv_bytes <= 1 << 20
    assert kept == own.kv_bytes // 2  # a layer with keys and values, as the model has one


def test_what_has_no_head_is_refused_by_name(tmp_path: Path):
    folder = save(tiny_model("qwen3.5", **ROPE), tmp_path / "plain")
    with pytest.raises(ModelError, match=r"draft_model: .*plain: these files have no head that guesses tokens"):
        opened(str(folder))
    with pytest.raises(BadRequest, match="draft_model: has no effect where 0 tokens are guessed ahead"):
        EngineConfig(model="m", draft_model=MTP, num_speculative_tokens=0)
