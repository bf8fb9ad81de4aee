"""The real small model: its embeddings are transformers' pooled states, also when they come from the cache."""

from array import array

import pytest
import torch

from kvloom.contract.pooling import POOLINGS
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from tests.real.test_transformers import PROMPTS
from tests.support.engine.engines import run_all

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
TEXTS = (*PROMPTS[:4], " ".join(PROMPTS))
FLOAT32_TOLERANCE = 1e-4  # relative to a vector's length
KERNEL_LIKENESS = 0.99  # cosine similarity with 8-bit weights


@pytest.fixture(scope="module")
def truth(oracle, tokenizer) -> dict[str, list[torch.Tensor]]:
    states = [oracle.states(tokenizer.encode(text)) for text in TEXTS]
    return {
        "last": [state[-1] for state in states],
        "mean": [state.mean(0) for state in states],
        "cls": [state[0] for state in states],
    }


@pytest.mark.parametrize("kind", ["reference, auto", "cpu, bf16"])
def test_embeddings_are_the_pooled_states_of_transformers(real, truth, kind):
    model = real(kind)
    engine = model.engine()
    for pooling in POOLINGS:
        rounds = []
        for turn in range(1 if pooling == "mean" else 2):  # the second turn uses the cache, but for mean
            requests = [
                Request(f"{pooling}{turn}{i}", model.ids(text), SamplingParams(max_tokens=0), pooling=pooling)
                for i, text in enumerate(TEXTS)
            ]
            found = run_all(engine, *requests)
            rounds.append([torch.tensor(array("f", found[r.id][0].embedding or b"")) for r in requests])
        for vector, again, wanted in zip(rounds[0], rounds[-1], truth[pooling], strict=True):
            if model.config.backend == "reference":
                assert float((vector - wanted).norm() / wanted.norm()) < FLOAT32_TOLERANCE
                assert float((again - vector).norm() / wanted.norm()) < FLOAT32_TOLERANCE
            else:
                assert float(torch.cosine_similarity(vector, wanted, dim=0)) > KERNEL_LIKENESS
                assert torch.equal(again, vector)
