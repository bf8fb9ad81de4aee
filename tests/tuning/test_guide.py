"""The tuning guide (spec 2.3.2), followed literally, with the commands and files that it names."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import mock_document
from tests.support.processes import CLI

ENGINE_TEST = (sys.executable, "-c", "from kvloom.tuning.engine_test import main; main()")
BLOCK, MAX_OUTPUT, NUM_ROWS, NUM_INPUT = 128, 16, 24, 40


@dataclass(slots=True)
class Site:
    """An install folder, and the results of a run in it."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "conf" / "config.json"

    def write(self, document: dict[str, Any]) -> None:
        self.config.parent.mkdir(exist_ok=True)
        self.config.write_text(json.dumps(document))
        self.config.chmod(0o640)

    def change(self, section: str, **values: Any) -> None:
        document = json.loads(self.config.read_text())
        at = document["ModelDeployParam"]["ModelParam"][0] if section == "ModelParam" else document[section]
        at |= values
        self.write(document)

    def run(self) -> "subprocess.CompletedProcess[str]":
        """Step 4: `llm_engine_test` with the data set in its folder; the Python log is on, as by set_env.sh."""
        for old in (self.folder / "logs").glob("*"):
            old.unlink()
        python = {"MIES_PYTHON_LOG_TO_FILE": "1", "MIES_PYTHON_LOG_PATH": str(self.folder / "python/pythonlog.log")}
        return subprocess.run(
            ENGINE_TEST,
            cwd=self.folder,
            env=os.environ | python,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )

    def completed(self) -> list[list[int]]:
        """Step 6: grep "COMPLETED" mindservice*.log, columns 2 to 8 (table 2-7)."""
        done = subprocess.run(
            'grep "COMPLETED" mindservice*.log', shell=True, cwd=self.folder / "logs", capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return [[int(v) for v in line.rpartition(": ")[2].split(" , ")[1:]] for line in done.stdout.splitlines()]

    def total_blocks(self) -> int:
        """npuBlockNum of the newest Python log."""
        newest = max((self.folder / "python").glob("pythonlog.log.*"), key=lambda path: path.stat().st_mtime_ns)
        found = re.search(r"npuBlockNum: (\d+)", newest.read_text())
        assert found is not None
        return int(found[1])


def figure(result: "subprocess.CompletedProcess[str]", name: str) -> float:
    assert result.returncode == 0, result.stderr
    found = re.search(rf"{name}\s*│\s*([\d.]+)", result.stdout)
    assert found is not None, result.stdout
    return float(found[1])


@pytest.fixture(params=["mock", pytest.param("tiny", marks=pytest.mark.real)])
def site(request, tmp_path) -> Site:
    document = mock_document(maxIterTimes=MAX_OUTPUT, maxBatchSize=2, maxPrefillBatchSize=2)
    document["ModelDeployParam"]["maxSeqLen"] = 1024
    if request.param != "mock":
        model = request.getfixturevalue("tiny_path")
        deployed = {"modelInstanceType": "Standard", "modelWeightPath": str(model), "npuMemSize": 0.003}
        document["ModelDeployParam"]["ModelParam"][0] |= deployed
    site = Site(tmp_path)
    site.write(document)
    rows = [[1, *(10 + (7 * row + i) % 200 for i in range(NUM_INPUT - 1))] for row in range(NUM_ROWS)]
    (tmp_path / "token_input_gsm.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return site


def follow(site: Site, average_input: float, average_output: float) -> int:
    """Steps 2 and 3: set the formulas' values from what the last run printed and logged. Returns maxBatchSize."""
    per_request = math.ceil(average_input / BLOCK) + math.ceil(MAX_OUTPUT / BLOCK)
    batch = max(1, site.total_blocks() // per_request)
    set_batch(site, batch, average_input)
    document = json.loads(site.config.read_text())
    document["OtherParam"]["ResourceParam"]["preAllocBlocks"] = math.ceil(average_output / BLOCK)
    site.write(document)
    return batch


def set_batch(site: Site, batch: int, average_input: float) -> None:
    site.change(
        "ScheduleParam",
        maxBatchSize=batch,
        maxPrefillTokens=4096,
        maxPrefillBatchSize=min(batch, int(4096 / average_input)),
        maxPreemptCount=min(10, batch),
        supportSelectBatch=True,
    )


def test_the_guide_can_be_followed_and_tune_ends_where_it_ends(site):
    first = site.run()
    average_input, average_output = figure(first, "average_input_length"), figure(first, "average_output_length")
    assert average_input == NUM_INPUT
    small = site.completed()
    assert sum(columns[-1] for columns in small) == NUM_ROWS
    assert max(columns[4] for columns in small) <= 2
    total = site.total_blocks()
    peak = max(columns[5] for columns in small)
    assert peak < total  # "Block Num below Total Block Num all the time: raise maxBatchSize"

    batch = follow(site, average_input, average_output)
    second = site.run()
    assert figure(second, "average_input_length") == average_input
    raised = site.completed()
    assert max(columns[5] for columns in raised) > peak
    assert max(columns[5] for columns in raised) <= site.total_blocks()
    assert max(columns[4] for columns in raised) <= batch

    set_batch(site, 1, average_input)  # lpot falls "only by steps": smaller batches until the limit holds
    assert site.run().returncode == 0
    assert {columns[4] for columns in site.completed()} == {1}

    document = tuned(site)
    schedule = document["ScheduleParam"]
    assert schedule["maxBatchSize"] <= batch
    assert (schedule["maxIterTimes"], schedule["supportSelectBatch"]) == (MAX_OUTPUT, True)
    assert schedule["maxPreemptCount"] == min(10, schedule["maxBatchSize"])
    assert schedule["maxPrefillTokens"] >= 4096
    most = int(schedule["maxPrefillTokens"] / average_input)
    assert schedule["maxPrefillBatchSize"] == min(schedule["maxBatchSize"], most)
    assert document["ModelDeployParam"]["npuDeviceIds"] == [[0]]
    site.write(document)
    assert figure(site.run(), "average_input_length") == average_input
    assert max(columns[5] for columns in site.completed()) <= site.total_blocks()


def tuned(site: Site) -> dict[str, Any]:
    """The proposal of `kvloom tune` for the same data set and the same longest answer."""
    options = ["--config", "conf/config.json", "--data", "token_input_gsm.csv", "--max-output", str(MAX_OUTPUT)]
    options += ["--output-len", str(MAX_OUTPUT), "--most", "4", "--point-s", "0.5"]
    done = subprocess.run(
        [*CLI, "tune", *options], cwd=site.folder, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr
    text = (site.folder / "tune" / "config.json").read_text()
    document: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return document


@pytest.mark.real
@pytest.mark.parametrize("site", ["tiny"], indirect=True)
def test_too_large_a_npu_mem_size_says_to_what_it_is_lowered(site):
    """Step 5: raise npuMemSize until "out of memory", then lower it."""
    site.change("ModelParam", npuMemSize=100000)
    result = site.run()
    assert result.returncode == 1
    found = re.search(r"out of memory: .*npuMemSize.* lower .* to at most ([\d.]+) GB", result.stderr)
    assert found is not None, result.stderr
    assert 0 < float(found[1]) < 100000
