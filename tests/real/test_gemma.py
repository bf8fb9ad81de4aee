"""A real file of another family, Q4_K_M: a correctly loaded Gemma 3 270M continues a count and assigns English text a
low loss."""

import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import pull
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from tests.support.models.checkpoints import generate, run_step

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TEXT = (
    "The sun is the star at the centre of the solar system. The planets move around it, and the moon moves around the "
    "earth. Plants use the light of the sun to make sugar from water and carbon dioxide, and animals eat the plants."
)


def test_a_real_gemma3_counts_and_finds_english_likely():
    path = pull("gemma3-270m")
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, 16, CpuOptions("stored", num_threads=2))
    answer = generate(backend, tokenizer.encode("1, 2, 3, 4, 5,"), 10, [3, 1])
    assert tokenizer.decode(answer).startswith(" 6, 7, 8")
    ids = tokenizer.encode(TEXT)
    logprobs = run_step(backend, [ids], [[7, 5, 6, 4]]).log_softmax(-1)
    taken = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert -float(taken.mean()) < 2.05  # 2.01; with one rotary base for all layers 2.08 or 2.24, with SiLU 2.67
