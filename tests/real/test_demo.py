"""A newcomer's first commands, with the real small model."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.processes import ServeProcess, serve

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


def assert_continues_with_paris(server: ServeProcess, model: str) -> None:
    body = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()
    assert "Paris" in answer["choices"][0]["text"], json.dumps(answer)


def test_the_demo_prints_an_answer_and_ends_well(smollm2_path):
    result = subprocess.run(
        [sys.executable, ROOT / "examples/demo.py"], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    question, answer = result.stdout.strip().split("\n", 1)
    assert question == "> Write one sentence about the sea."
    assert len(answer.split()) > 5


@pytest.mark.parametrize("options", [("--backend", "reference"), ("--weight-format", "w4a8")])
def test_each_way_to_run_it_says_that_paris_is_the_capital(smollm2_path, options):
    with serve(str(smollm2_path), "--max-seq-len", "512", *options) as server:
        assert_continues_with_paris(server, smollm2_path.stem)


@pytest.mark.parametrize("named", [(), ("smollm2",)])
def test_a_newcomers_first_question_gets_a_sensible_answer(smollm2_path, named):
    with serve(*named) as server:  # `make serve` names no model
        assert_continues_with_paris(server, "smollm2")
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"temperature": 0}, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
