"""The real small model: its embeddings are transformers' pooled states, and cached as computed."""

from array import array

import pytest
import torch

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.pooling import POOLINGS
from kvloom.engine.request import Request, SamplingParams
from kvloom.engine.runner import open_runner
from kvloom.engine.tokenizer import load_tokenizer
from tests.real.test_transformers import PROMPTS, oracle
from tests.support.engines import run_all

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
TEXTS = (*PROMPTS[:4], " ".join(PROMPTS))
FLOAT32_TOLERANCE = 1e-4  # of a vector's length
KERNEL_LIKENESS = 0.99  # cosine: 8-bit weights


@pytest.fixture(scope="module")
def truth(smollm2_path) -> dict[str, list[torch.Tensor]]:
    model, tokenizer = oracle(smollm2_path), load_tokenizer(smollm2_path)
    with torch.no_grad():
        states = [model.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0] for text in TEXTS]
    return {"last": [state[-1] for state in states], "mean": [state.mean(0) for state in states]}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_embeddings_are_the_pooled_states_of_transformers(smollm2_path, truth, backend):
    tokenizer = load_tokenizer(smollm2_path)
    config = EngineConfig(model=str(smollm2_path), backend=backend, num_blocks=100, max_seq_len=256)
    engine = Engine(config, InProcessExecutor(open_runner(config, [], lambda done, total: None)), tokenizer)
    for pooling in POOLINGS:
        rounds = []
        for turn in range(2):  # the second time from the cache, but for the mean
            requests = [
                Request(
                    f"{pooling}{turn}{i}", tuple(tokenizer.encode(text)), SamplingParams(max_tokens=0), pooling=pooling
                )
                for i, text in enumerate(TEXTS)
            ]
            found = run_all(engine, *requests)
            rounds.append([torch.tensor(array("f", found[r.id][0].embedding or b"")) for r in requests])
        for vector, again, wanted in zip(*rounds, truth[pooling], strict=True):
            if backend == "reference":
                assert float((vector - wanted).norm() / wanted.norm()) < FLOAT32_TOLERANCE
                assert float((again - vector).norm() / wanted.norm()) < FLOAT32_TOLERANCE
            else:
                assert float(torch.cosine_similarity(vector, wanted, dim=0)) > KERNEL_LIKENESS
                assert torch.equal(again, vector)
