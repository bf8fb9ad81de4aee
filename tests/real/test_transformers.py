"""The real small model: greedy answers of the engine are those of transformers in fp32."""

import os

import pytest

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from tests.support.engine.engines import run_all, tokens_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def quicksort(items):\n",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "1, 2, 3, 5, 8,",
    "Roses are red,",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "In 1969, the first",
    "To make bread you need",
    "¿Cómo estás?",
    "Bonjour, je m'appelle",
    "The quick brown fox",
    "Q: What is the tallest mountain?\nA:",
    "Once the sun had set, the",
    "# Introduction\n\n",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
)
IS_LONG = "KVLOOM_TEST_LONG_ANSWERS" in os.environ
NUM_TOKENS = [64 if IS_LONG else 24 if i < 1 else 8 if i < 5 else 3 for i in range(len(PROMPTS))]


def test_greedy_answers_to_20_prompts_are_those_of_transformers(real, oracle):
    """Each token must be the oracle's most likely one after the prompt and the tokens before it."""
    model = real("reference, auto")
    requests = [
        Request(text, model.ids(text), SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
        for text, num_tokens in zip(PROMPTS, NUM_TOKENS, strict=True)
    ]
    found = run_all(model.engine(), *requests)
    for request in requests:
        answer = tokens_of(found[request.id])
        assert len(answer) == request.params.max_tokens
        likeliest = oracle.likeliest([*request.prompt_ids, *answer])
        assert likeliest[len(request.prompt_ids) - 1 : -1] == answer, request.id
