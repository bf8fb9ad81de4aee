"""Activated LoRA (Greenewald et al. 2025): an adapter acts from the last invocation tokens of the prompt on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.adapters import NEVER, last_of
from kvloom.rank.fake import adapter_mark, fake_next
from kvloom.rank.loading import open_runner
from tests.support.engine.engines import engine_over, fake_engine, run_all, tokens_of
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.models.checkpoints import save, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
INVOKED = [7, 8]


@pytest.fixture
def folder(tmp_path):
    return str(make_adapter(tmp_path / "adapter", TINY_SHAPES, alora_invocation_tokens=INVOKED))


def prompt_of(length: int, *starts: int) -> tuple[int, ...]:
    """Tokens with the invocation at `starts`."""
    tokens = [20 + i for i in range(length)]
    for start in starts:
        tokens[start : start + len(INVOKED)] = INVOKED
    return tuple(tokens)


def answer(prompt, begin, digest, params=GREEDY):
    """What the fake model answers when the adapter acts from position `begin` on; None = nowhere."""
    mark = 0 if begin is None else adapter_mark(digest)
    context = [token + mark * (begin is not None and i >= begin) for i, token in enumerate(prompt)]
    for _ in range(params.max_tokens):
        context.append(fake_next(context, params, 0) + mark)
    return [token - mark for token in context[len(prompt) :]]


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        (prompt_of(9, 0), 0),
        (prompt_of(9, 7), 7),
        (prompt_of(9, 2, 5), 5),
        (prompt_of(9), NEVER),
        ((7, 7, 7, 8), 2),
        ((8, 7), NEVER),
        ((7,), NEVER),
        ((), NEVER),
    ],
)
def test_the_last_invocation_counts(prompt, begin):
    assert last_of(INVOKED, prompt) == begin


@pytest.mark.parametrize("config", [{}, {"max_batch": 4, "max_tokens_per_step": 5}, {"num_speculative_tokens": 4}])
@pytest.mark.parametrize("starts", [(), (0,), (19,), (4,), (2, 11), (16,)])
def test_it_acts_from_the_invocation_on(folder, starts, config):
    engine = fake_engine(**config)
    adapter, prompt = engine.adapters.load(folder), prompt_of(21, *starts)
    found = run_all(engine, Request("a", prompt, GREEDY, adapter=adapter.id), Request("b", prompt, GREEDY))
    assert tokens_of(found["a"]) == answer(prompt, starts[-1] if starts else None, adapter.info.digest)
    assert tokens_of(found["b"]) == answer(prompt, None, "")


def test_blocks_before_the_invocation_are_those_of_the_base_model(folder):
    engine = fake_engine(num_blocks=128)  # blocks of four tokens
    adapter, prompt = engine.adapters.load(folder), prompt_of(30, 18)
    run_all(engine, Request("base", prompt, GREEDY))
    cached = {}
    for name, tokens in (("same", prompt), ("again", prompt), ("longer", (*prompt, *prompt_of(12, 6)))):
        deltas = run_all(engine, Request(name, tokens, GREEDY, adapter=adapter.id))[name]
        assert tokens_of(deltas) == answer(tokens, last_of(INVOKED, tokens), adapter.info.digest), name
        cached[name] = deltas[-1].num_cached_tokens
    assert cached == {"same": 16, "again": 29, "longer": 30}  # of the longer one the base model's, to its invocation
    plain = run_all(engine, Request("plain", prompt, GREEDY))["plain"]
    assert tokens_of(plain) == answer(prompt, None, "")


def test_a_mixed_batch_with_preemption_gives_each_the_answer_it_has_alone(folder):
    engine = fake_engine(num_blocks=26)
    adapter, params = engine.adapters.load(folder), replace(GREEDY, max_tokens=30)
    starts = [(), (0,), (3,), (5, 8)] * 2
    requests = [
        Request(str(i), prompt_of(12 + i, *own), params, adapter=adapter.id * (i != 4)) for i, own in enumerate(starts)
    ]
    found = run_all(engine, *requests)
    for request, own in zip(requests, starts, strict=True):
        begin = own[-1] if own and request.adapter else None
        assert tokens_of(found[request.id]) == answer(request.prompt_ids, begin, adapter.info.digest, params)
    assert engine.stats().total_preemptions > 0


def of_hooks(model, folder, prompt, num_tokens, begin):
    """Greedy tokens of transformers with the adapter's matrices added to linears from position `begin` on."""
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    scale = json.loads((Path(folder) / "adapter_config.json").read_text())["lora_alpha"] / 4
    handles = []
    for key in [key for key in tensors if "lora_A" in key]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]

        def added(_, inputs, output, a=a, b=b):
            acts = (torch.arange(output.shape[1]) >= begin)[None, :, None]
            return output + acts * (inputs[0] @ a.T @ b.T) * scale

        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        handles.append(model.get_submodule(name).register_forward_hook(added))
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    for handle in handles:
        handle.remove()
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "backend", [{"backend": "reference", "dtype": "float32"}, {"backend": "cpu", "weight_format": "bf16"}]
)
def test_a_model_with_weights_answers_as_with_matrices_added_from_there_on(tmp_path, backend):
    model = tiny_model("qwen3")
    path = save(model, tmp_path / "model")
    runner = open_runner(EngineConfig(model=str(path), num_blocks=60, **backend), [], lambda done, total: None)
    shapes = runner._backend.whole_spec.tensor_shapes()
    own = str(make_adapter(tmp_path / "adapter", shapes, 3, size=2.0, alora_invocation_tokens=INVOKED))
    params = replace(GREEDY, max_tokens=4)
    for starts in ((), (20,), (3, 30)):
        engine = engine_over(runner, max_batch=4, max_tokens_per_step=13)
        adapter, prompt = engine.adapters.load(own), prompt_of(40, *starts)
        found = run_all(engine, Request("a", prompt, params, adapter=adapter.id))["a"]
        engine.adapters.unload(adapter.id)
        begin = starts[-1] if starts else NEVER
        assert tokens_of(found) == of_hooks(model, own, prompt, params.max_tokens, begin), starts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alora_invocation_tokens": "<|start|>"}, "alora_invocation_tokens must be a list of token ids"),
        ({"alora_invocation_tokens": [1, -1]}, "alora_invocation_tokens must be a list of token ids, got [1, -1]"),
        ({"alora_invocation_tokens": [True]}, "alora_invocation_tokens must be a list of token ids"),
        ({"alora_invocation_tokens": [1], "task_type": "SEQ_CLS"}, 'task_type must be "CAUSAL_LM" with alora'),
    ],
)
def test_an_invocation_that_cannot_be_is_refused_by_name(tmp_path, fields, words):
    folder = make_adapter(tmp_path, TINY_SHAPES, **fields)
    with pytest.raises(BadRequest) as caught:
        read_adapter(folder, TINY_SHAPES)
    assert words in str(caught.value)


@pytest.mark.parametrize(("tokens", "invocation"), [(None, ()), ([], ()), ([3, 4], (3, 4))])
def test_without_one_it_acts_on_all_tokens(tmp_path, tokens, invocation):
    assert (
        read_adapter(make_adapter(tmp_path, TINY_SHAPES, alora_invocation_tokens=tokens), None).invocation == invocation
    )
