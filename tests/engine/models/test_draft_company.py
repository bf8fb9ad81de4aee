"""A draft model beside all else that an engine does: no answer changes, and the drafts come to something."""

from pathlib import Path

import pytest
import torch

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.byte_tokenizer import VOCAB_SIZE, ByteTokenizer
from kvloom.rank.grammar import guides
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from kvloom.server.chat.grammars import json_grammar, regex_grammar
from tests.support.engine.drafts import check_behind_pool, draft_always
from tests.support.engine.engines import engine_over, run_all, text_of, tokens_of
from tests.support.models.assistants import SHARING, Pair
from tests.support.models.checkpoints import save, tiny_model

DRAFTS = 4
COLOURS = {f"lighthouse_{name}": {"enum": ["red", "green"]} for name in ("keeper", "colour")}
OBJECT = json_grammar(
    {"type": "object", "properties": COLOURS, "required": list(COLOURS), "additionalProperties": False}, "schema", True
)
GREEDY = {"temperature": 0, "max_tokens": 40}
SEEDED = {"temperature": 1.0, "seed": 9, "max_tokens": 40}
ASKED: dict[str, SamplingParams] = {
    "an object": SamplingParams(grammar=OBJECT, **GREEDY),
    "an object, by seed": SamplingParams(grammar=OBJECT, logprobs=2, **SEEDED),
    "a pattern": SamplingParams(grammar=regex_grammar("ab[cd]efg([0-9]h){3}|abz", "regex"), **SEEDED),
    "a reasoning": SamplingParams(reasoning_end="</think>", max_reasoning_tokens=9, grammar=OBJECT, **SEEDED),
    "penalties": SamplingParams(frequency_penalty=0.9, ignore_eos=True, **GREEDY),
    "logprobs of three tokens": SamplingParams(logprobs=3, ignore_eos=True, **SEEDED),
    "logprobs of the prompt": SamplingParams(logprobs=1, prompt_logprobs=2, ignore_eos=True, **GREEDY),
    "a bias": SamplingParams(logit_bias={101: 5.0}, ignore_eos=True, **SEEDED),
}
# Models beside which one of full attention guesses: tiny model, and what of its configuration fits the kernels.
MODELS = {
    "all layers with a window": ("mistral, window of 7", {"head_dim": 32}),
    "layers with a window": ("gemma3", {"head_dim": 32}),
    "delta rule": ("qwen3.5", {"head_dim": 128}),
    "short convolution": ("lfm2", {"num_attention_heads": 2}),
    "mamba2 beside attention": ("falcon h1", {"num_attention_heads": 2, "mamba_d_head": 32, "mamba_d_ssm": 128}),
    "mamba2, without keys and values": ("mamba2", {}),
}


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs; and no mask counts as one that takes long."""
    draft_always(monkeypatch)
    monkeypatch.setattr(guides, "_SOON_S", 100.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes. Its draft model is itself: what differs then is no guess."""
    model = tiny_model("qwen3", head_dim=32, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    return save(model, tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=["itself", "an assistant"])
def pair(request: pytest.FixtureRequest, folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bool]:
    """A model of bytes, what guesses for it, and whether it is right; a random assistant is right by chance."""
    if request.param == "itself":
        return folder, folder, True
    sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "max_position_embeddings": 512}
    main, draft = Pair(SHARING, **sizes).save(tmp_path_factory.mktemp("assisted"))
    return Path(main), Path(draft), False


def config_of(folder: Path, draft: Path | None, **fields: object) -> EngineConfig:
    sizes = {"num_blocks": 60, "max_seq_len": 300, "num_speculative_tokens": DRAFTS if draft else 0, **fields}
    return EngineConfig(model=str(folder), draft_model=str(draft or ""), backend="cpu", weight_format="w8a8", **sizes)


def opened(folder: Path, draft: Path | None, **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    runner = open_runner(config_of(folder, draft, **fields), [], lambda done, total: None)
    runner._guides = Guides(ByteTokenizer, runner.info.vocab_size, must_wait=True)
    return runner


def engine_of(folder: Path, draft: Path | None, **fields: object) -> Engine:
    named = {"model": "m", "draft_model": "d", "backend": "auto", "num_speculative_tokens": DRAFTS} if draft else {}
    return engine_over(opened(folder, draft, **fields), **named)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 7 * i) % 90 + 1 for i in range(length))


def told(deltas: dict[str, list[Delta]]) -> dict[str, object]:
    """All that answers say, however many tokens came at once."""
    return {
        id: (
            tokens_of(found),
            text_of(found),
            [one for delta in found for one in delta.logprobs],
            found[0].prompt_logprobs,
            (found[-1].finish_reason, found[-1].stop_reason),
        )
        for id, found in deltas.items()
    }


def requests(asked: dict[str, SamplingParams]) -> list[Request]:
    return [Request(name, prompt(9 + 6 * i, 11 * i), params) for i, (name, params) in enumerate(asked.items())]


def test_grammars_and_log_probabilities_are_those_without_it(pair):
    main, draft, is_right = pair
    want = told(run_all(engine_of(main, None), *requests(ASKED)))
    assert all(reason != (FinishReason.ERROR, None) for *_, reason in want.values())
    engine = engine_of(main, draft)
    assert told(run_all(engine, *requests(ASKED))) == want
    assert engine.stats().total_draft_tokens > 60
    assert engine.stats().total_accepted_tokens > 60 * is_right
    alone = engine_of(main, draft)
    assert {id: one for each in requests(ASKED) for id, one in told(run_all(alone, each)).items()} == want


def test_an_answer_ends_where_it_would_without_it(pair):
    """At a stop string, a stop token or a length, in the middle of guesses that are right."""
    main, draft, is_right = pair
    plain, engine = engine_of(main, None), engine_of(main, draft)
    (whole,) = run_all(plain, Request("a", prompt(9), SamplingParams(ignore_eos=True, **GREEDY))).values()
    text, tokens = text_of(whole), tokens_of(whole)
    ends: dict[str, SamplingParams] = {
        f"length {count}": SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in range(1, 12)
    }
    for at in range(3, 15):
        for kept in (False, True):
            stops = {"stop": (text[at : at + 2],), "include_stop": kept}
            ends[f"string {at} {kept}"] = SamplingParams(ignore_eos=True, **stops, **GREEDY)
        ends[f"token {at}"] = SamplingParams(ignore_eos=True, stop_token_ids=(tokens[at],), **GREEDY)
    asked = [Request(name, prompt(9), params) for name, params in ends.items()]
    want = told(run_all(plain, *asked))
    assert {reason for *_, (reason, _) in want.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert told(run_all(engine, *asked)) == want
    assert engine.stats().total_draft_tokens > 0
    assert engine.stats().total_accepted_tokens >= is_right
    engine.check()


def test_several_answers_to_one_prompt_are_those_without_it(pair):
    """They wait for its blocks, which one of them computes, and the draft model reads each block once."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(5)]
    asked = [Request(f"a-{i}", prompt(70), each) for i, each in enumerate(params)]
    main, draft, is_right = pair
    want = told(run_all(engine_of(main, None), *asked))
    assert len({str(one) for one in want.values()}) == 5
    engine = engine_of(main, draft)
    assert told(run_all(engine, *asked)) == want
    stats = engine.stats()
    assert stats.total_cached_tokens >= 4 * 64
    assert is_right <= stats.total_accepted_tokens < stats.total_draft_tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_blocks", [60, 24])
def test_it_guesses_for_models_whose_layers_keep_windows_or_states(name, num_blocks, tmp_path):
    """In company, found in the cache, and where blocks are few."""
    family, fields = MODELS[name]
    main = save(tiny_model(family, **{"max_position_embeddings": 512, **fields}), tmp_path / "main")
    draft = save(tiny_model("qwen3", head_dim=32, max_position_embeddings=512), tmp_path / "draft")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = [Request(f"r{n}", prompt(n, n), params) for n in (5, 40, 150)]
    plain, engine = engine_of(main, None, num_blocks=num_blocks), engine_of(main, draft, num_blocks=num_blocks)
    want = told(run_all(plain, *asked))
    for _ in range(2):
        assert told(run_all(engine, *asked)) == want
    assert engine.stats().total_draft_tokens > 0


def test_a_model_with_windows_is_its_own_draft_model(tmp_path):
    """A draft model with a window keeps all its keys and values."""
    main = save(tiny_model("gemma3", head_dim=32, max_position_embeddings=512), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = [Request(f"r{n}", prompt(n, n), params) for n in (5, 40, 150)]
    want = told(run_all(engine_of(main, None), *asked))
    engine = engine_of(main, main)
    assert told(run_all(engine, *asked)) == want
    stats = engine.stats()
    assert stats.total_accepted_tokens > 0.9 * stats.total_draft_tokens > 0


def test_with_a_pool_what_is_loaded_is_read_again_by_it(folder):
    """The pool has the model's keys and values alone."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = Request("a", prompt(150), params)
    want = tokens_of(run_all(engine_of(folder, None), asked)["a"])
    check_behind_pool(config_of(folder, folder), asked, want)
