"""Models whose layers keep a state of each sequence: answers are the same whatever the schedule, and what needs a state
to go back is refused or switched off.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import Batch
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule import prefix
from kvloom.pool.agent import Agent
from kvloom.rank.loading import open_runner
from kvloom.rank.main import open_runner as open_rank
from kvloom.rank.runner import ModelRunner
from kvloom.rank.tier.tier import TieredRunner
from kvloom.server.run.kvnote import kv_note
from tests.support.engine.drafts import draft_always
from tests.support.engine.engines import drain, engine_over, run_all, tokens_of
from tests.support.engine.greedy import LENGTHS, answers, num_answered, prompt, requests
from tests.support.models.adapters import adapted
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import running_agent
from tests.support.waiting import until

MODELS = {  # of each mixer with a state: tiny model, and what of its configuration fits the kernels
    "delta rule": ("qwen3.5", {"head_dim": 128}),  # of which 32 dimensions are rotated
    "delta rule with decays of channels, latents": ("kimi linear", {}),
    "short convolution": ("lfm2", {"num_attention_heads": 2}),
    "mamba2": ("granite 4", {"num_attention_heads": 2}),
    "mamba2 beside attention": ("falcon h1", {"num_attention_heads": 2, "mamba_d_head": 32, "mamba_d_ssm": 128}),
    "layers of one branch": ("nemotron h, experts", {}),
    "mamba2, without keys and values": ("mamba2", {}),
}
BACKENDS = ["cpu", "reference"]
NUM_BLOCKS = 40


EACH_MODEL = pytest.mark.parametrize("model", MODELS, indirect=True, scope="module")
# Where the kernels matter less than what the engine does with states, the reference computes the first model only.
PAIRS = [*((name, "cpu") for name in MODELS), (next(iter(MODELS)), "reference")]
EACH_PAIR = pytest.mark.parametrize(("model", "backend"), PAIRS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    """The first of MODELS where a test does not ask for each."""
    name, fields = MODELS[getattr(request, "param", next(iter(MODELS)))]
    return tiny_model(name, **fields)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


def config_of(folder: Path, backend: str, **fields: object) -> EngineConfig:
    sizes = {"num_blocks": NUM_BLOCKS, "max_seq_len": 200, **fields}
    return EngineConfig(model=str(folder), backend=backend, **sizes)


def opened(folder: Path, backend: str, **fields: object) -> ModelRunner:
    return open_runner(config_of(folder, backend, **fields), [], lambda done, total: None)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(folder, backend) -> list[list[int]]:
    """The answers, each computed alone with its prompt in one step."""
    return [answers(engine_over(opened(folder, backend)), [length])[0] for length in LENGTHS]


@EACH_MODEL
def test_greedy_answers_are_those_of_transformers(model, folder):
    """In float32: weights and keys of the kernels are bfloat16."""
    model.generation_config.eos_token_id = None  # answers do not end
    for length, found in zip(LENGTHS, answers(engine_over(opened(folder, "reference"))), strict=True):
        ids = torch.tensor([prompt(length)])
        seen = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}  # which prompts have, too
        wanted = model.generate(ids, max_new_tokens=num_answered(length), do_sample=False, **seen)
        assert found == wanted[0, length:].tolist()


@EACH_MODEL
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_batch": 4, "max_tokens_per_step": 8}, {"run_ahead": False}],
    ids=["in company", "in chunks", "step by step"],
)
def test_the_schedule_changes_no_answer(folder, alone, backend, fields):
    assert answers(engine_over(opened(folder, backend), **fields)) == alone


@EACH_MODEL
def test_wrong_guesses_stay_in_no_state(folder, alone, backend, monkeypatch):
    """Every fifth token of what the answers were said to be is wrong."""
    draft_always(monkeypatch)
    engine = engine_over(opened(folder, backend), num_speculative_tokens=4)
    told = [tuple((token + (i % 5 == 4)) % 128 for i, token in enumerate(answer)) for answer in alone]
    asked = [replace(request, prediction=words) for request, words in zip(requests(), told, strict=True)]
    found = run_all(engine, *asked)
    assert [tokens_of(found[request.id]) for request in asked] == alone
    stats = engine.stats()
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens


@EACH_PAIR
@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 400], ids=["computed again", "swapped"])
def test_a_sequence_that_was_preempted_goes_on_where_it_was(folder, alone, backend, num_host_blocks):
    runner = opened(folder, backend, num_blocks=11, num_host_blocks=num_host_blocks, max_seq_len=110)
    engine = engine_over(runner)
    assert answers(engine) == alone
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_swapped > 0) == (0 < runner.info.state_host_blocks < num_host_blocks)
    assert stats.num_free_host_blocks == stats.num_host_blocks


@EACH_MODEL
def test_an_adapter_of_all_linears_answers_as_their_merged_weights_and_has_states_of_its_own(model, folder, tmp_path):
    merged = adapted(model, tmp_path / "adapter")
    merged.generation_config.eos_token_id = None
    engine, lengths = engine_over(opened(folder, "reference")), LENGTHS[-1:]
    if model.config.model_type == "falcon_h1":
        with pytest.raises(BadRequest, match=r"feed_forward\.\w+\.lora_A\.weight is none of"):
            engine.adapters.load(str(tmp_path / "adapter"))
        return
    adapter = engine.adapters.load(str(tmp_path / "adapter"))
    base = answers(engine, lengths)
    ids = torch.tensor([prompt(*lengths)])
    seen = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    wanted = merged.generate(ids, max_new_tokens=num_answered(*lengths), do_sample=False, **seen)[0, ids.shape[1] :]
    assert wanted.tolist() != base[0]
    for _ in range(2):
        (request,) = (replace(request, adapter=adapter.id) for request in requests(lengths))
        assert tokens_of(run_all(engine, request)[request.id]) == wanted.tolist()
        assert answers(engine, lengths) == base


@EACH_PAIR
def test_an_adapter_acts_alike_alone_and_in_company(model, folder, backend, tmp_path):
    adapted(model, tmp_path / "adapter")
    if model.config.model_type == "falcon_h1":
        return
    engines = [engine_over(opened(folder, backend, snapshot_share=share)) for share in (0.0, 0.25)]
    ids = [engine.adapters.load(str(tmp_path / "adapter")).id for engine in engines]
    asked = [replace(request, adapter=ids[0]) for request in requests()]
    alone = [tokens_of(run_all(engines[0], request)[request.id]) for request in asked]
    for _ in range(2):
        found = run_all(engines[1], *asked, *(replace(request, id=f"base {request.id}") for request in requests()))
        assert [tokens_of(found[request.id]) for request in asked] == alone


def test_no_more_sequences_run_than_there_are_states(folder, alone, backend):
    engine = engine_over(opened(folder, backend, max_batch=2))
    for request in requests():
        engine.add(request)
    engine.step()
    engine.step()
    assert engine.stats().num_running == 2
    found = drain(engine)
    assert [tokens_of(found[request.id])[-1] for request in requests()] == [tokens[-1] for tokens in alone]


def test_a_prompt_that_was_seen_before_begins_with_its_state_and_is_answered_alike(folder, alone, backend):
    engine = engine_over(opened(folder, backend))
    assert answers(engine) == answers(engine) == alone
    assert engine.stats().total_cached_tokens == 39 + 89, "all but the last token; the shortest one is not worth it"


def turns(engine: Engine) -> list[tuple[list[int], int]]:
    """A conversation, its last answer again, and two that leave it: answers, and how many tokens each computed."""
    found, history = [], list(prompt(50))

    def ask(tokens: Sequence[int]) -> list[int]:
        request = Request(f"{len(found)}", tuple(tokens), SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
        deltas = run_all(engine, request)[request.id]
        found.append((tokens_of(deltas), len(tokens) - deltas[0].num_cached_tokens))
        return tokens_of(deltas)

    for length in (0, 5, 30):
        history += prompt(length)
        asked = list(history)
        history += ask(history)
    for tokens in (asked, *([*history[:68], (history[68] + i) % 128, *prompt(20)] for i in (1, 2, 3))):
        ask(tokens)
    return found


def sizes_of(size: int) -> dict[str, int]:
    return {"num_blocks": 1280 // size, "block_size": size, "max_seq_len": 160}


@pytest.fixture(scope="module")
def computed(folder) -> Callable[[str], list[list[int]]]:
    """By kernels, the answers of `turns` without snapshots, in blocks of 16."""

    @functools.cache
    def answers_of(kernels: str) -> list[list[int]]:
        told = turns(engine_over(opened(folder, kernels, snapshot_share=0.0, **sizes_of(16))))
        assert [count for _, count in told] == [50, 76, 127, 127, 89, 89, 89]
        return [tokens for tokens, _ in told]

    return answers_of


@pytest.mark.parametrize(("kernels", "size"), [("cpu", 16), ("cpu", 128), ("reference", 16)])
@pytest.mark.parametrize("fields", [{}, {"max_tokens_per_step": 8, "max_batch": 4}], ids=["whole", "in chunks"])
def test_a_conversation_from_the_cache_is_the_one_that_is_computed(folder, computed, kernels, size, fields):
    cached = turns(engine_over(opened(folder, kernels, **sizes_of(size)), **fields))
    assert [tokens for tokens, _ in cached] == computed(kernels)
    assert [count for _, count in cached] == [50, 5 + 1, 30 + 1, 1, 89 - 49, 21, 21]


def test_memory_that_went_back_to_the_system_is_no_part_of_an_answer(folder, alone, backend):
    engine = engine_over(opened(folder, backend))
    assert answers(engine) == alone
    engine.release_free()
    assert answers(engine) == alone


@EACH_PAIR
def test_an_aborted_sequence_leaves_nothing_to_the_next_one(folder, alone, backend):
    engine = engine_over(opened(folder, backend, max_batch=1))
    engine.add(Request("gone", prompt(50), SamplingParams(temperature=0, max_tokens=40)))
    for _ in range(5):
        engine.step()
    engine.abort("gone")
    assert answers(engine) == alone


def test_what_cannot_work_with_states_is_told(folder, backend, caplog):
    with caplog.at_level(logging.WARNING):
        info = opened(folder, backend, num_speculative_tokens=4, host_cache_bytes=None, max_batch=7).info
    assert info.lacks == {}
    assert info.num_states == 7
    config = config_of(folder, backend, num_host_blocks=1)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        open_runner(config, [], lambda done, total: None)
    assert "cpuMemSize has no room for a sequence with its state of" in caplog.text
    told = kv_note("m", info, config)
    assert "for sequences that are swapped out" in told
    assert "and for 7 sequences at once, whose states of 0 MB each take up to 0 MB, and for 1024 such states of" in told


def test_a_model_without_keys_and_values_has_room_for_its_longest_sequence(tmp_path):
    folder = save(tiny_model("mamba2", max_position_embeddings=4096), tmp_path)
    info = opened(folder, "cpu", num_blocks=None, max_seq_len=None, max_batch=3).info
    assert (info.max_seq_len, info.num_blocks, info.kv_bytes, info.num_states) == (4096, 3 * 4096 // 16, 0, 3)


def tiered(folder: Path, kernels: str, agent: Agent, **fields: object) -> TieredRunner:
    tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0, {"socket": str(agent.config.socket)}, is_watched=True)
    runner = open_rank(config_of(folder, kernels, kv_tier=tier, **fields), [], lambda done, total: None)
    until(lambda: runner.run(Batch([], [], [])).is_tier_up)
    return runner


@pytest.mark.parametrize("kernels", BACKENDS)
def test_after_a_restart_a_conversation_comes_from_the_pool_and_is_the_one_that_is_computed(folder, computed, kernels):
    tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0)
    with running_agent(pool_bytes=64 << 20) as agent:
        for most in ([50, 5 + 1, 30 + 1, 1, 89 - 49, 21, 21], [prefix.LEAST_APART] * 7):
            runner = tiered(folder, kernels, agent, **sizes_of(16))
            engine = engine_over(runner, kv_tier=tier)
            found = turns(engine)
            assert [tokens for tokens, _ in found] == computed(kernels)
            assert all(count <= limit for (_, count), limit in zip(found, most, strict=True))
            runner.close()
        assert engine.stats().total_tier_loaded_states > 0


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_prompt_that_was_computed_for_another_engine_is_taken_up_there(folder, kernels):
    tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = Request("answer", prompt(100), params)
    with running_agent(pool_bytes=64 << 20) as agent:
        first = tiered(folder, kernels, agent, num_blocks=40, max_seq_len=160)
        prefill = Request("prompt", prompt(100), replace(params, max_tokens=1), gives_kv=True)
        (given,) = (delta.kv_given for delta in run_all(engine_over(first, kv_tier=tier), prefill)["prompt"])
        assert given.num_blocks == 99 // 16
        first.close()  # one of a process has the pool
        second = tiered(folder, kernels, agent, num_blocks=40, max_seq_len=160)
        taken = run_all(engine_over(second, kv_tier=tier), replace(asked, kv_location=given.location))["answer"]
        second.close()
    computed = run_all(engine_over(opened(folder, kernels)), asked)["answer"]
    assert (tokens_of(taken), taken[0].num_cached_tokens) == (tokens_of(computed), 99)


def test_an_outer_tier_without_room_for_states_or_without_keys_is_refused_by_name(folder, backend, tmp_path):
    tier = TierConfig("kvloom.rank.tier.ems:open_tier")
    with pytest.raises(ModelError, match="its layers keep states, and snapshotShare has no room for those of prefixes"):
        open_rank(config_of(folder, backend, kv_tier=tier, snapshot_share=0.0), [], lambda done, total: None)
    other = save(tiny_model("mamba2"), tmp_path)
    with pytest.raises(ModelError, match="no layer has keys and values, of which an outer KV tier is made"):
        open_rank(config_of(other, backend, kv_tier=tier), [], lambda done, total: None)
