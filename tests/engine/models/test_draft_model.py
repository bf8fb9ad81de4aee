"""Draft models: what one guesses changes no answer, is right where it is the model itself, and is told and bounded."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.drafter import Drafter
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.drafts import draft_always
from tests.support.engine.engines import drain, engine_over, in_process, run_all, tokens_of
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import VOCAB_SIZE, save, tiny_model

BACKENDS = ["cpu", "reference"]
NUM_BLOCKS = 40
DRAFTS = 4
KINDS = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=5, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=3, top_p=0.8, repetition_penalty=1.3, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=0.9, presence_penalty=0.1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=12, max_tokens=24),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The model, and draft models: itself, one that is a little different, and one of another kind with a shorter
    context and fewer tokens.
    """
    path = tmp_path_factory.mktemp("models")
    whole, other = tiny_model("qwen3"), tiny_model("qwen3")
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    short = tiny_model("llama", head_dim=32, vocab_size=VOCAB_SIZE - 28, max_position_embeddings=40)
    return {
        name: str(save(model, path / name)) for name, model in (("whole", whole), ("other", other), ("short", short))
    }


def opened(folders: dict[str, str], draft: str = "", backend: str = "cpu", **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    sizes = {"num_blocks": NUM_BLOCKS, "max_seq_len": 200, "num_speculative_tokens": DRAFTS, **fields}
    sizes["weight_format"] = "w8a8" if backend == "cpu" else "auto"  # as a draft model of an unquantised file is
    config = EngineConfig(model=folders["whole"], draft_model=folders.get(draft, ""), backend=backend, **sizes)
    return open_runner(config, [100], lambda done, total: None)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Whatever it costs, all that the draft model guesses is drafted. Returns what an engine needs for it."""
    draft_always(monkeypatch)
    return {"num_speculative_tokens": DRAFTS, "model": "m", "draft_model": "d", "backend": "auto"}


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 7 * i) % 90 + 1 for i in range(length))


def requests() -> list[Request]:
    return [Request(f"r{i}", prompt(5 + 6 * i, 11 * i), params) for i, params in enumerate(KINDS)]


def told(deltas: dict[str, list[Delta]], parts: slice = slice(2)) -> dict[str, object]:
    """What answers say, however many tokens came at once: tokens, their log-probabilities, those of the prompt."""
    return {
        id: (tokens_of(found), [one for d in found for one in d.logprobs], found[0].prompt_logprobs)[parts]
        for id, found in deltas.items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft", ["whole", "other", "short"])
def test_answers_are_those_without_a_draft_model(folders, backend, draft, drafting):
    """In float32 of torch numbers differ in their last digits from shape to shape: there tokens are compared."""
    parts = slice(None) if backend == "cpu" else slice(1)
    want = told(run_all(engine_over(opened(folders, backend=backend)), *requests()), parts)
    engine = engine_over(opened(folders, draft, backend), **drafting)
    assert told(run_all(engine, *requests()), parts) == want
    alone = engine_over(opened(folders, draft, backend), **drafting)
    assert {id: one for each in requests() for id, one in told(run_all(alone, each), parts).items()} == want
    stats = engine.stats()
    assert (draft != "short") <= stats.total_accepted_tokens < stats.total_draft_tokens


def test_a_model_that_is_its_own_draft_model_is_right(folders, drafting):
    engine = engine_over(opened(folders, "whole"), **drafting)
    greedy = [request for request, params in zip(requests(), KINDS, strict=True) if params == KINDS[0]]
    run_all(engine, *greedy, Request("long", prompt(90), KINDS[0]))
    stats = engine.stats()
    assert stats.total_accepted_tokens == stats.total_draft_tokens
    assert stats.total_steps < 24


def test_a_prompt_in_the_cache_is_there_for_the_draft_model_too(folders, drafting):
    runner = opened(folders, "whole")
    engine = engine_over(runner, **drafting)
    want = told(run_all(engine, Request("a", prompt(70), KINDS[0])))["a"]
    drafter = runner._drafter
    assert isinstance(drafter, Drafter)
    before = engine.stats().total_accepted_tokens
    engine.add(Request("b", prompt(70), KINDS[0]))
    engine.step()
    (seq,) = drafter._seqs.values()
    assert seq.num_known == 64
    assert told(drain(engine))["b"] == want
    stats = engine.stats()
    assert before < stats.total_accepted_tokens == stats.total_draft_tokens


def test_a_long_text_is_read_in_chunks_and_guesses_come_behind_it(folders, drafting, monkeypatch):
    monkeypatch.setattr("kvloom.rank.drafter.LEAST_ROOM", 16)
    monkeypatch.setattr("kvloom.engine.schedule.by_model.ModelCost.room", lambda self, limit_s: 0)
    want = told(run_all(engine_over(opened(folders)), Request("a", prompt(90), KINDS[0])))
    engine = engine_over(opened(folders, "whole"), **drafting)
    assert told(run_all(engine, Request("a", prompt(90), KINDS[0]))) == want
    stats = engine.stats()
    assert 0 < stats.total_accepted_tokens == stats.total_draft_tokens
    assert 6 + 3 < stats.total_steps < 6 + 6


@pytest.mark.parametrize("fields", [{"max_preempt": None}, {"num_host_blocks": 30}, {"run_ahead": False}])
def test_preemption_swaps_and_the_schedule_change_no_answer(folders, drafting, fields):
    want = told(run_all(engine_over(opened(folders)), *requests()))
    sizes = {"num_blocks": 14, "num_host_blocks": fields.get("num_host_blocks", 0)}
    engine = engine_over(opened(folders, "whole", **sizes), **drafting, **fields)
    assert told(run_all(engine, *requests())) == want
    assert engine.stats().total_preemptions > 0


def test_answers_go_on_after_a_crash(folders, drafting):
    want = {id: one[0] for id, one in told(run_all(engine_over(opened(folders)), *requests())).items()}
    engine = engine_over(opened(folders, "whole"), **drafting)
    found: dict[str, list[int]] = {id: [] for id in want}
    for request in requests():
        engine.add(request)
    for _ in range(5):
        deltas = engine.step()
        for delta in deltas:
            found[delta.request_id] += delta.token_ids
    engine._executor = in_process(opened(folders, "whole"), engine.config)
    for delta in (*engine.suspend(), *engine.resume({})):
        found[delta.request_id] += delta.token_ids
    for id, deltas in drain(engine).items():
        found[id] += tokens_of(deltas)
    assert found == want
    assert engine.stats().total_recomputed_tokens > 0


def test_it_guesses_without_the_adapter_of_a_request(folders, drafting, tmp_path):
    adapter = make_adapter(tmp_path, open_checkpoint(folders["whole"]).spec.tensor_shapes())

    def answers(engine: Engine) -> dict[str, object]:
        found = engine.load_adapter(str(adapter))
        asked = [Request("a", prompt(9), KINDS[0], adapter=found.id), Request("b", prompt(9), KINDS[0])]
        return told(run_all(engine, *asked))

    want = answers(engine_over(opened(folders)))
    assert want["a"] != want["b"]
    assert answers(engine_over(opened(folders, "whole"), **drafting)) == want


@pytest.fixture(scope="module")
def runners(folders) -> dict[str, ModelRunner]:
    return {draft: opened(folders, draft) for draft in ("", "whole", "other", "short")}


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    num_blocks=st.integers(8, 30),
    max_tokens=st.integers(8, 60),
    draft=st.sampled_from(["whole", "other", "short"]),
    kind=st.sampled_from(KINDS[:4]),
    run_ahead=st.booleans(),
)
def test_no_schedule_and_no_draft_model_changes_an_answer(
    runners, lengths, num_blocks, max_tokens, draft, kind, run_ahead
):
    """Each runner keeps what earlier engines have left in its blocks."""
    asked = [Request(f"r{i}", prompt(length, 5 * i % 2), kind) for i, length in enumerate(lengths)]
    want = told(run_all(engine_over(runners[""]), *asked))
    own = {"num_speculative_tokens": DRAFTS, "model": "m", "draft_model": "d", "backend": "auto"}
    config = EngineConfig(**own, max_batch=4, max_tokens_per_step=max_tokens, run_ahead=run_ahead)
    executor = in_process(runners[draft], config)
    executor.info = structs.replace(executor.info, num_blocks=num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        draft_always(patch)
        assert told(run_all(Engine(config, executor, ByteTokenizer()), *asked)) == want


# -- what is told and refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_weights_and_keys_are_a_part_of_the_plan_of_memory(folders, backend):
    budget = {"num_blocks": None, "kv_cache_bytes": 1 << 20, "backend": backend}
    plain, own = opened(folders, **budget).info, opened(folders, "whole", **budget).info
    assert own.num_blocks == plain.num_blocks // 2
    weights, kept = own.draft_bytes
    assert own.kv_bytes == 2 * kept <= 1 << 20
    assert weights == own.weight_bytes == plain.weight_bytes
    assert plain.draft_bytes == (0, 0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_speculative_tokens": 0}, "draft_model: has no effect where 0 tokens are guessed ahead"),
        ({"backend": "fake"}, "draft_model: has no effect with a mock"),
        ({"world_size": 2}, "draft_model: works with one rank, world_size is 2"),
    ],
)
def test_what_has_no_draft_model_is_refused_by_name(fields, sentence):
    with pytest.raises(BadRequest, match=sentence):
        EngineConfig(model="m", draft_model="d", **fields)


def test_a_draft_model_with_states_is_refused(folders, tmp_path):
    folder = save(tiny_model("lfm2", num_attention_heads=2), tmp_path / "states")
    with pytest.raises(ModelError, match=r"draft_model: layers of .* keep states"):
        opened({**folders, "states": str(folder)}, "states")


def test_a_model_that_makes_embeddings_has_no_draft_model(folders, tmp_path: Path):
    folder = save(tiny_model("qwen3").model, tmp_path / "embeds")
    with pytest.raises(ModelError, match=r"draft_model: .*embeds generates no text"):
        opened({**folders, "embeds": str(folder)}, "embeds")
    with pytest.raises(ModelError, match="generates no text, so nothing is guessed for it"):
        opened({**folders, "whole": str(folder), "draft": folders["whole"]}, "draft")
