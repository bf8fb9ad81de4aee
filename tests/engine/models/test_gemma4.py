"""Gemma 4: layers with heads of their own, that read the keys of an earlier one, and get inputs of their own.

Answers are those of transformers, and the same whatever the schedule and wherever keys and values have been.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import family_of
from kvloom.checkpoints.metadata import read_shape
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.engine.engine import Engine
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.engine.weights.test_gguf import write
from tests.support.engine.engines import engine_over, run_all, tokens_of
from tests.support.engine.executors import opened as executor_of
from tests.support.engine.greedy import LENGTHS, answers, num_answered, prompt, requests
from tests.support.models.checkpoints import TINY_MODELS, save, tiny_model, transformers
from tests.support.pool.agents import running_agent

NAMES = [name for name in TINY_MODELS if name.startswith("gemma4") and "unified" not in name]
KINDS = {  # how it is computed
    "cpu": {"backend": "cpu"},
    "int8 keys": {"backend": "cpu", "kv_dtype": "int8"},
    "8 bits": {"backend": "cpu", "weight_format": "w8a8"},
    "reference": {"backend": "reference", "dtype": "float32"},
}


# Every model in the first kind, one in the others: what these change is alike in all.
CASES = [*((name, "cpu") for name in NAMES), *((NAMES[0], kind) for kind in KINDS if kind != "cpu")]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def folder(case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(case[0]), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def kind(case) -> dict[str, str]:
    return KINDS[case[1]]


def opened(folder: Path, kind: dict[str, str], **fields: object) -> ModelRunner:
    sizes = {"num_blocks": 40, "max_seq_len": 110, **fields}
    return open_runner(EngineConfig(model=str(folder), **kind, **sizes), [], lambda done, total: None)


drawn = partial(answers, is_drawn=True)


@pytest.fixture(scope="module")
def alone(folder, kind) -> list[list[int]]:
    """The answers, each computed alone with its prompt in one step."""
    return [drawn(engine_over(opened(folder, kind)), [length])[0] for length in LENGTHS]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name, tmp_path):
    """In float32: weights and keys of the kernels are bfloat16."""
    model = tiny_model(name)
    found = answers(engine_over(opened(save(model, tmp_path), KINDS["reference"])))
    for length, answer in zip(LENGTHS, found, strict=True):
        ids = torch.tensor([prompt(length)])
        wanted = model.generate(
            ids, max_new_tokens=num_answered(length), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer == wanted[0, length:].tolist()


def test_of_a_model_that_sees_the_text_is_served(tmp_path):
    text = tiny_model(NAMES[0])
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Gemma4Config(text_config=text.config.to_dict(), vision_config=sight, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    assert open_checkpoint(save(model, tmp_path / "seeing")).unread == ()
    (found, wanted) = (
        tokens_of(run_all(engine_over(opened(folder, KINDS["reference"])), *requests((40,)))["40"])
        for folder in (tmp_path / "seeing", save(text, tmp_path / "text"))
    )
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_layers_in_a_gguf_file_are_known_without_its_tensors(name, tmp_path):
    """As a service that plans memory reads them."""
    path = write(tmp_path / "m.gguf", tiny_model(name), "gemma4")
    arch, config = read_shape(path)
    whole = open_checkpoint(path).spec
    found = family_of(arch, "m").spec({"vocab_size": 128, **config})
    assert [(own.num_kv_heads, own.head_dim, own.window, own.keys_of) for _, own in found.attention] == [
        (own.num_kv_heads, own.head_dim, own.window, own.keys_of) for _, own in whole.attention
    ]
    assert [found.mlp_size(layer) for layer in range(found.num_layers)] == [
        whole.mlp_size(layer) for layer in range(whole.num_layers)
    ]


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_batch": 4, "max_tokens_per_step": 8}, {"run_ahead": False}, {"num_speculative_tokens": 4}],
    ids=["in company", "in chunks", "step by step", "with drafts"],
)
def test_the_schedule_changes_no_answer(folder, alone, kind, fields):
    if kind["backend"] == "reference" and "max_tokens_per_step" in fields:
        pytest.skip("torch's products may differ in the last bits")
    assert drawn(engine_over(opened(folder, kind), **fields)) == alone


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_sequence_that_was_preempted_goes_on_alike(folder, alone, kind, num_host_blocks):
    engine = engine_over(opened(folder, kind, num_blocks=11, num_host_blocks=num_host_blocks))
    assert drawn(engine) == alone
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_swapped > 0) == (num_host_blocks > 0)


def test_a_prompt_that_was_seen_before_is_read_from_the_cache(folder, alone, kind):
    engine = engine_over(opened(folder, kind, block_size=32))
    assert drawn(engine) == drawn(engine) == alone
    assert engine.stats().total_cached_tokens > 0


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_blocks_of_the_pool_are_those_that_were_computed(tmp_path, kv_dtype):
    path = save(tiny_model(NAMES[0]), tmp_path)
    kind = {"backend": "cpu", "kv_dtype": kv_dtype}
    want = drawn(engine_over(opened(path, kind)))
    with running_agent(pool_bytes=32 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 5.0, {"socket": str(agent.config.socket)}, True)
        config = EngineConfig(model=str(path), num_blocks=40, max_seq_len=110, kv_tier=tier, **kind)
        for is_warm in (False, True):
            with executor_of(config) as executor:
                engine = Engine(config, executor, ByteTokenizer())
                assert drawn(engine) == want
                assert (engine.stats().total_tier_loaded_blocks > 0) == is_warm
