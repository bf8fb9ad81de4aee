"""What every quantised folder must give: the logits and the matrices of the weights that it stands for."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.engine.weights.test_blocks import values_of
from tests.support.models.checkpoints import run_step, tiny_model

TOKENS = [5, 9, 1, 77, 30, 2, 2, 101]


def wide_model() -> Any:
    return tiny_model("qwen2", hidden_size=128, intermediate_size=256)


def check_logits(model: Any, folder: Path) -> None:
    """Those of the folder are the model's: exactly in float32, nearly in the kernels."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.unread == ()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    reference = ReferenceBackend(checkpoint.spec, checkpoint.weights, 4)
    torch.testing.assert_close(run_step(reference, [TOKENS], [[2]]), wanted, atol=2e-4, rtol=1e-4)
    found = run_step(CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("stored")), [TOKENS], [[2]])
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def check_matrix(model: Any, folder: Path, name: str, key: str) -> str:
    """The folder's tensor `name` has the values of the model's `key`, as floats and in its form. Returns that."""
    weights = open_checkpoint(folder).weights
    wanted = model.state_dict()[f"model.{key}.weight"].numpy()
    raw = weights.tensor(name)
    assert np.allclose(raw.float32(), wanted, rtol=1e-6, atol=1e-6)
    assert weights.form(name) == raw.form
    if raw.form:
        found = np.concatenate([values_of(raw.form, numbers) for _, numbers in raw.number_pieces()])
        assert np.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    return raw.form
