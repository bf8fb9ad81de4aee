"""Models whose files hold rotary partners of queries and keys side by side: quantised folders, adapters."""

import numpy as np
import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.lora import read_adapter
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.engine.kernels.models import all_logits, ragged
from tests.support.models.adapters import PARTS, make_adapter
from tests.support.models.checkpoints import run_step, save, tiny_model
from tests.support.models.quantized import write_folder

from .test_families import TOKENS
from .test_quantized_folders import FORMATS

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq of 8 bits", "compressed, a scale a token", "fp8 by block"])
def test_a_quantised_folder_is_computed_as_its_values_say(name, tmp_path):
    model = tiny_model("ernie", **WIDE)
    checkpoint = open_checkpoint(write_folder(model, tmp_path, FORMATS[name]))
    assert checkpoint.weights.form("layers.0.q") == FORMATS[name].form
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    reference = ReferenceBackend(checkpoint.spec, checkpoint.weights, 4)
    torch.testing.assert_close(run_step(reference, [TOKENS], [[2]]), wanted, atol=5e-4, rtol=1e-3)
    kernels = run_step(CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("stored")), [TOKENS], [[2]])
    assert float((kernels - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("family", ["glm4", "ernie", "llama"])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_an_adapter_adds_what_it_adds_in_its_own_order(family, is_cpu, tmp_path):
    model = tiny_model(family, head_dim=64)
    checkpoint = open_checkpoint(save(model, tmp_path / "model"))
    parts = ("q", "k", "v", "o")
    folder = make_adapter(tmp_path / "adapter", checkpoint.spec.tensor_shapes(), parts=parts, size=0.5)
    adapter = read_adapter(folder, checkpoint.spec.tensor_shapes())
    data = np.frombuffer(adapter.data, np.uint8)
    for name, module in adapter.modules.items():
        sides = (data[adapter.tensors[key].start : adapter.tensors[key].end] for key in (module.a, module.b))
        a, b = (torch.from_numpy(side.view(np.float32).copy()) for side in sides)
        _, layer, part = name.split(".")
        linear = model.get_submodule(f"model.layers.{layer}.{PARTS[part]}")
        linear.weight.data += module.scale * b.view(-1, module.rank) @ a.view(module.rank, -1)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    if is_cpu:
        backend = CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("bf16"))
    else:
        backend = ReferenceBackend(checkpoint.spec, checkpoint.weights, 4)
    backend.add_adapter(1, adapter)
    found = all_logits(backend, *ragged([(TOKENS, 0, [2])], [1]))
    assert float((found - wanted).norm() / wanted.norm()) < (0.05 if is_cpu else 1e-5)
