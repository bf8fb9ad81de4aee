"""The Engine API in C++ over the real small model: its answers are those of the Python form."""

import queue
import re
import shutil
from pathlib import Path

import pytest

from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.engine_api import InferenceEngine, InferenceRequest, InferenceResponse
from tests.support.engine.cpp import compile_example, real_host, run_program, write_real_config

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):", "One, two, three,")


def answers_in_python(config: Path) -> dict[str, list[int]]:
    """The number of each prompt -> its answer."""
    responses: queue.Queue[InferenceResponse] = queue.Queue()
    found: dict[str, list[int]] = {}
    num_ended = 0
    with InferenceEngine() as engine:
        assert engine.init(responses.put, config).is_ok()
        for number, prompt in enumerate(PROMPTS):
            request = InferenceRequest(str(number))
            request.set_input_text(prompt)
            request.set_max_output_len(16)
            assert engine.forward(request).is_ok()
            found[str(number)] = []
        while num_ended < len(PROMPTS):
            response = responses.get(timeout=100)
            num_ended += response.is_eos()
            name = response.get_request_id().string_value()
            found[name] += response.immutable_output("OUTPUT_IDS")[1].buffer().tolist()
    return found


def test_a_program_answers_as_python_does(smollm2_path, tmp_path):
    config = write_real_config(tmp_path, smollm2_path)
    rows = [load_tokenizer(smollm2_path).encode(prompt) for prompt in PROMPTS]
    data = tmp_path / "data.csv"
    data.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    program, host = compile_example(), real_host(tmp_path)
    printed = run_program(program, host, str(config), str(data), timeout_s=500)
    answers = {m[1]: [int(id) for id in m[2].split()] for m in re.finditer(r"^(\d+):(.*);", printed, re.MULTILINE)}
    assert answers == answers_in_python(config)
    assert "Paris" in load_tokenizer(smollm2_path).decode(answers["0"])
    text = run_program(program, host, str(config), "--text", PROMPTS[0], timeout_s=500)
    assert f"text: {' '.join(map(str, answers['0']))}; flag 6" in text
