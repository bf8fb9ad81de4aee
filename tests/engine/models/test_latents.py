"""Latent attention: answers are those of transformers, and the same whatever the schedule and wherever keys were."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import family_of
from kvloom.checkpoints.footprint import kv_token_bytes
from kvloom.checkpoints.lora import WEIGHTS_FILE
from kvloom.checkpoints.metadata import read_shape
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.loading import choose_backend, open_runner
from kvloom.rank.runner import ModelRunner
from tests.engine.weights.test_gguf import write
from tests.support.engine.engines import engine_over, run_all, tokens_of
from tests.support.engine.executors import opened as executor_of
from tests.support.engine.greedy import LENGTHS, answers, num_answered, prompt, requests
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import save, tiny_model, transformers
from tests.support.pool.agents import running_agent

NAMES = ("deepseek v2, lite", "deepseek v3", "mistral4")
KINDS = {  # how it is computed
    "cpu": {"backend": "cpu"},
    "int8 keys": {"backend": "cpu", "kv_dtype": "int8"},
    "8 bits": {"backend": "cpu", "weight_format": "w8a8"},
    "reference": {"backend": "reference", "dtype": "float32"},
    "int8 keys of the reference": {"backend": "reference", "dtype": "float32", "kv_dtype": "int8"},
}


# Every model in the first kind, one in the others: what these change is alike in all.
CASES = [*((name, "cpu") for name in NAMES), *(("deepseek v3", kind) for kind in KINDS if kind != "cpu")]


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


@pytest.fixture(scope="module")
def alone(folder, kind) -> list[list[int]]:
    """The answers, each computed alone with its prompt in one step."""
    return [answers(engine_over(opened(folder, kind)), [length])[0] for length in LENGTHS]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name, tmp_path):
    model = tiny_model(name)
    found = answers(engine_over(opened(save(model, tmp_path), KINDS["reference"])))
    for length, answer in zip(LENGTHS, found, strict=True):
        ids = torch.tensor([prompt(length)])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_answered(length),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer == wanted[0, length:].tolist()


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_batch": 4, "max_tokens_per_step": 8}, {"run_ahead": False}, {"num_speculative_tokens": 4}],
    ids=["in company", "in chunks", "step by step", "with drafts"],
)
def test_the_schedule_changes_no_answer(folder, alone, kind, fields):
    if kind["backend"] == "reference" and "max_tokens_per_step" in fields:
        pytest.skip("torch's products may differ in the last bits")
    assert answers(engine_over(opened(folder, kind), **fields)) == alone


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_sequence_that_was_preempted_goes_on_alike(folder, alone, kind, num_host_blocks):
    engine = engine_over(opened(folder, kind, num_blocks=11, num_host_blocks=num_host_blocks))
    assert answers(engine) == alone
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_swapped > 0) == (num_host_blocks > 0)


def test_a_prompt_that_was_seen_before_is_read_from_the_cache(folder, alone, kind):
    engine = engine_over(opened(folder, kind, block_size=32))
    assert answers(engine) == answers(engine) == alone
    assert engine.stats().total_cached_tokens > 0


def test_several_answers_to_a_prompt_share_its_blocks(folder, kind):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    both = [Request(f"{seed}", prompt(40), replace(params, seed=seed)) for seed in (5, 6)]
    apart = [tokens_of(run_all(engine_over(opened(folder, kind)), request)[request.id]) for request in both]
    found = run_all(engine_over(opened(folder, kind)), *both)
    assert [tokens_of(found[request.id]) for request in both] == apart
    assert apart[0] != apart[1]


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "8 bits"])
def test_blocks_of_the_pool_are_those_that_were_computed(tmp_path, kind):
    path, kind = save(tiny_model(NAMES[0]), tmp_path), KINDS[kind]
    want = answers(engine_over(opened(path, kind)))
    with running_agent(pool_bytes=32 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 5.0, {"socket": str(agent.config.socket)}, True)
        config = EngineConfig(model=str(path), num_blocks=40, max_seq_len=110, kv_tier=tier, **kind)
        for is_warm in (False, True):
            with executor_of(config) as executor:
                engine = Engine(config, executor, ByteTokenizer())
                assert answers(engine) == want
                assert (engine.stats().total_tier_loaded_blocks > 0) == is_warm


def test_the_cache_holds_each_latent_once(folder, kind):
    runner = opened(folder, kind)
    spec = open_checkpoint(folder).spec
    config = EngineConfig(model=str(folder), **kind)
    own = spec.layers[0].mixer
    numbers, backend = own.kv_rank + own.rope_dim, kind["backend"]
    number_bytes, scale_bytes = {"cpu": (2, 2), "reference": (4, 4)}[backend]
    each = numbers + scale_bytes if kind.get("kv_dtype") == "int8" else number_bytes * numbers
    assert kv_token_bytes(config, backend, spec) == 3 * each
    assert sum(part[0].nbytes for layer in runner.kv_layers for part in layer) == 16 * 3 * each


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"q_lora_rank": 48}, "latents of queries of 48 numbers: the CPU backend has multiples of 32"),
        ({"v_head_dim": 40}, "head size 40: the CPU backend has multiples of 32 up to 576"),
        ({"kv_lora_rank": 560}, "head size 592: the CPU backend has multiples of 32 up to 576"),
    ],
)
def test_sizes_that_the_cpu_kernels_lack_are_named_and_torch_is_chosen(fields, told, tmp_path):
    path = save(tiny_model("deepseek v3", **fields), tmp_path)
    with pytest.raises(ModelError, match=told):
        opened(path, {"backend": "cpu"})
    assert choose_backend(EngineConfig(model=str(path)), open_checkpoint(path).spec) == "reference"


def test_adapters_are_those_of_merged_weights(tmp_path):
    model = tiny_model("deepseek v3")
    shapes = open_checkpoint(save(model, tmp_path / "model")).spec.tensor_shapes()
    parts = ("q_down", "q_up", "kv_down", "o")
    path = make_adapter(tmp_path / "adapter", shapes, parts=parts)
    engine = engine_over(opened(tmp_path / "model", KINDS["reference"]))
    adapter = engine.adapters.load(str(path))
    found = run_all(engine, replace(requests((40,))[0], adapter=adapter.id))
    pairs = load_file(path / WEIGHTS_FILE)
    for key, b in pairs.items():
        if key.endswith("lora_B.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            model.get_submodule(name).weight.data += 2 * b @ pairs[key.replace("lora_B", "lora_A")]
    merged = engine_over(opened(save(model, tmp_path / "merged"), KINDS["reference"]))
    assert tokens_of(found["40"]) == tokens_of(run_all(merged, *requests((40,)))["40"])


def test_adapters_of_the_matrix_of_keys_and_values_are_refused(tmp_path):
    model = save(tiny_model("deepseek v3"), tmp_path / "model")
    path = make_adapter(tmp_path / "adapter", open_checkpoint(model).spec.tensor_shapes(), parts=("o",))
    pairs = load_file(path / WEIGHTS_FILE)
    save_file({key.replace("o_proj", "kv_b_proj"): value for key, value in pairs.items()}, path / WEIGHTS_FILE)
    engine = engine_over(opened(model, KINDS["reference"]))
    with pytest.raises(BadRequest, match=r"kv_b_proj\.lora_[AB]\.weight is none of lora_A, lora_B of q_proj"):
        engine.adapters.load(str(path))


def test_a_file_with_one_matrix_for_keys_and_values_gives_the_same(tmp_path):
    """As files before April 2025 have it, whose sizes of heads are those without absorption."""
    model = tiny_model("deepseek v2, lite")
    new = write(tmp_path / "new.gguf", model, "deepseek2")
    model.config.has_kv_b = True
    old = write(tmp_path / "old.gguf", model, "deepseek2")
    assert answers(engine_over(opened(old, KINDS["reference"]))) == answers(
        engine_over(opened(new, KINDS["reference"]))
    )


def test_quantised_files_keep_the_matrices_of_heads_as_they_are(tmp_path):
    model = tiny_model("deepseek v2, lite", moe_intermediate_size=64)
    path = write(tmp_path / "m.gguf", model, "deepseek2", "Q8_0")
    weights = open_checkpoint(path).weights
    assert weights.form("layers.0.k_up") == weights.form("layers.0.v_up") == "int8"
    assert weights.tensor("layers.0.k_up").shape == (4 * 64, 32)
    assert len(answers(engine_over(opened(path, KINDS["reference"])))) == len(LENGTHS)


@pytest.mark.parametrize("name", NAMES[:2])
def test_sizes_in_a_gguf_file_are_known_without_its_tensors(name, tmp_path):
    """As a service that plans memory reads them."""
    path = write(tmp_path / "m.gguf", tiny_model(name), "deepseek2")
    arch, config = read_shape(path)
    found = family_of(arch, "m").spec({"vocab_size": 128, **config})
    sizes = [[replace(own, rope=None) for _, own in spec.attention] for spec in (found, open_checkpoint(path).spec)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("deepseek v2", {"topk_method": "noaux_tc"}, "configuration: topk_method 'noaux_tc' is not known"),
        ("deepseek v2", {"norm_topk_prob": True}, "configuration: norm_topk_prob is not supported by deepseek_v2"),
        ("deepseek v3", {"attention_bias": True}, "deepseek_v3 with attention_bias is not supported"),
        ("deepseek v3", {"kv_lora_rank": 0}, "configuration: kv_lora_rank must be a positive whole number, got 0"),
        (
            "glm4 moe lite",
            {"mlp_layer_types": ["thin"]},
            "configuration: mlp_layer_types must name layers dense or sparse, got ['thin']",
        ),
        ("llama", {"kv_lora_rank": 512}, "llama with latent attention (kv_lora_rank) is not supported"),
    ],
)
def test_what_cannot_be_computed_is_named(name, fields, told):
    model = tiny_model(name)
    config = {**model.config.to_dict(), **fields}
    with pytest.raises(ModelError) as error:
        family_of(type(model).__name__, "m").spec(config)
    assert str(error.value) == told


def test_of_mistral_4_that_sees_the_text_is_served(tmp_path):
    text = tiny_model("mistral4")
    sight = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, "patch_size": 16, "head_dim": 16}
    sight |= {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.Mistral3Config(
        text_config=text.config.to_dict(), vision_config=sight, tie_word_embeddings=False
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    assert open_checkpoint(save(model, tmp_path / "seeing")).unread == ()
    (found, wanted) = (
        tokens_of(run_all(engine_over(opened(folder, KINDS["reference"])), *requests((40,)))["40"])
        for folder in (tmp_path / "seeing", save(text, tmp_path / "text"))
    )
    assert found == wanted
