"""`llm_engine_test` as a process, over the mock model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import fake_answer
from kvloom.tuning.drive import drive
from tests.support.configs import mock_document

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with conf/config.json of the mock model and a data set of 12 rows."""
    (tmp_path / "conf").mkdir()
    document = mock_document(maxIterTimes=20)
    path = tmp_path / "conf" / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    (tmp_path / "token_input_gsm.csv").write_text("".join(f"1,{i},{i + 1}\n" for i in range(12)))
    return tmp_path


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from kvloom.tuning.engine_test import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def expected(prompt: list[int], count: int) -> list[int]:
    ids = fake_answer(prompt, GREEDY, 0, count)
    return ids[: ids.index(257) + 1] if 257 in ids else ids


def test_the_default_data_set_is_run_and_figures_are_printed(folder):
    result = run(folder)
    assert result.returncode == 0, result.stderr
    for name in ("average_input_length", "first token", "lpot", "generate speed", "p99"):
        assert name in result.stdout
    assert "3.0 tokens" in result.stdout
    assert "12/12" in result.stderr
    assert not (folder / "token_output.csv").exists()


def test_answers_are_recorded_in_the_order_of_the_rows(folder):
    result = run(folder, "token_input_gsm.csv", "1")
    assert result.returncode == 0, result.stderr
    rows = [[int(v) for v in line.split(",")] for line in (folder / "token_output.csv").read_text().splitlines()]
    assert rows == [expected([1, i, i + 1], 20) for i in range(12)]


def test_zero_does_not_record_and_rows_that_begin_otherwise_are_told(folder):
    (folder / "mine.csv").write_text("5,6\n1,2\n")
    result = run(folder, "mine.csv", "0")
    assert result.returncode == 0
    assert "1 of 2 rows do not begin with token 1" in result.stderr
    assert not (folder / "token_output.csv").exists()


@pytest.mark.parametrize(
    ("text", "says"), [("1,2\n1,258\n", "prompt 2: INPUT_IDS: token id 258"), ("1,b\n", "line 1: must be token ids")]
)
def test_a_bad_row_is_one_line_and_exit_code_1(folder, text, says):
    (folder / "bad.csv").write_text(text)
    result = run(folder, "bad.csv")
    assert result.returncode == 1
    assert says in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_no_data_set_or_configuration_is_one_line(folder):
    assert "none.csv: cannot be read" in run(folder, "none.csv").stderr
    (folder / "conf" / "config.json").unlink()
    result = run(folder)
    assert result.returncode == 1
    assert "config.json" in result.stderr


def test_a_run_gives_every_answer_and_stops_in_time():
    prompts = [[1, i] for i in range(50)]
    config = EngineConfig(backend="fake", max_batch=4)
    found = drive(config, prompts, max_output=9)
    assert found.answers == [expected(prompt, 9) for prompt in prompts]
    assert found.figures.num_failed == 0
    assert sum(len(times.gaps_s) + 1 for times in found.times) == sum(map(len, found.answers))
    slow = EngineConfig(backend="fake", max_batch=4, fake_step_s=0.02)
    cut = drive(slow, prompts, max_output=100, max_s=0.3)
    assert 4 <= len(cut.times) < 50
    assert all(times.ended_s is not None for times in cut.times)


def test_an_engine_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(ModelError):
        drive(EngineConfig(model=str(tmp_path / "none")), [[1]])
