"""The real small model with adapters: the tokens of merged weights in transformers (fp32), alone and in batches."""

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from tests.support.engine.engines import run_all, tokens_of
from tests.support.lazily import lazily
from tests.support.models.adapters import make_adapter

oracles = lazily("tests.real.oracle")
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NUM_TOKENS = 16
PROMPTS = ("The capital of France is", "def quicksort(items):\n", "Once upon a time, there was a")
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(smollm2_path, tmp_path_factory) -> list[str]:
    shapes = open_checkpoint(smollm2_path).spec.tensor_shapes()
    root = tmp_path_factory.mktemp("adapters")
    return [str(make_adapter(root / str(rank), shapes, rank, rank, size=0.3)) for rank in (8, 16, 5)]


def merged(oracle: "oracles.Oracle", folder: str) -> Any:
    """A copy of the model with W += alpha / r * B A, as peft's merge does, by the file's own names."""
    model = copy.deepcopy(oracle.model())
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    for key in [key for key in tensors if "lora_A" in key]:
        linear = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        linear.weight.data += (
            config["lora_alpha"] / config["r"] * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        )
    return model


def test_greedy_answers_with_an_adapter_are_those_of_its_merged_weights(real, oracle, folders, smollm2_path):
    """Each token must be the oracle's most likely one after the prompt and the tokens before it."""
    base = real("reference, auto")
    engine = base.engine()
    id = engine.adapters.load(folders[0]).id
    prompts = [base.ids(text) for text in PROMPTS]
    few = replace(PARAMS, max_tokens=6)  # the reference reads all weights for each token of each sequence
    requests = [Request(f"{own}-{i}", ids, few, adapter=own) for own in (0, id) for i, ids in enumerate(prompts)]
    found = {name: tokens_of(deltas) for name, deltas in run_all(engine, *requests).items()}
    engine.adapters.unload(id)
    adapter = b"".join(path.read_bytes() for path in (*sorted(Path(folders[0]).iterdir()), Path(__file__)))
    changed = oracles.Oracle(smollm2_path, functools.cache(lambda: merged(oracle, folders[0])), adapter)
    for i, ids in enumerate(prompts):
        answer = found[f"{id}-{i}"]
        assert changed.likeliest([*ids, *answer])[len(ids) - 1 : -1] == answer
        assert answer != found[f"0-{i}"]  # the adapter has a visible effect


@pytest.mark.parametrize("kind", ["cpu, bf16", "cpu, int8"])
def test_three_adapters_and_the_base_in_a_batch_answer_as_each_alone(real, folders, kind):
    """On the CPU kernels, also when blocks run out, with prompts in chunks, and with sampling."""
    model = real(kind)
    engine = model.engine(
        num_blocks=12, max_seq_len=128, max_batch=8, max_tokens_per_step=11, enable_prefix_cache=False
    )
    ids = [0, *(engine.adapters.load(folder).id for folder in folders)]
    sampled = replace(PARAMS, temperature=0.8, seed=5)
    requests = [
        Request(f"r{i}", model.ids(PROMPTS[i % 3] * 3), sampled if i % 2 else PARAMS, adapter=ids[i % 4])
        for i in range(8)
    ]
    together = {name: tokens_of(deltas) for name, deltas in run_all(engine, *requests).items()}
    assert engine.stats().total_preemptions > 0
    alone = {request.id: tokens_of(run_all(engine, request)[request.id]) for request in requests}
    assert together == alone
    same_prompt = Request("base", requests[1].prompt_ids, sampled)
    assert tokens_of(run_all(engine, same_prompt)["base"]) != alone["r1"]
    for id in ids:
        engine.adapters.unload(id)
