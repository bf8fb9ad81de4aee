"""Weights that an earlier start packed: they give the same bits, and processes share their memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.checkpoints.fingerprint import stamp
from kvloom.rank.kernels import build, packed
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.kept import DATA_OFFSET, KeptWeights
from kvloom.rank.kernels.packed import Packed

from .models import MIXED, SPECS, MemoryWeights, all_logits, four_bit, mixed_weights, ragged, random_weights

ISAS = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
NAME = "smollm2 heads"
STEP = [(list(range(1, 40)), 0, [3, 5, 7])]


@pytest.fixture
def kept(tmp_path):
    return KeptWeights(tmp_path / "packed", 10**9)


@pytest.fixture
def model(tmp_path):
    """A file that stands for the model's: the tests make the weights themselves, and the file's bytes identify them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 100)
    return path


class Unread(MemoryWeights):
    """Weights whose matrices must not be read."""

    def tensor(self, name):
        raw = super().tensor(name)
        assert len(raw.shape) == 1, f"{name} was read although it is kept"
        return raw


def opened(kept: KeptWeights, model: Path, weights: MemoryWeights, **options: object) -> CpuBackend:
    """Opens a backend, and returns once the weights that it keeps are written."""
    before = Packed(kept, model, stamp(str(model)), worth_bytes=0)
    given = {"num_threads": 2, "packed": before, **options}
    backend = CpuBackend(SPECS[NAME], weights, 64, CpuOptions(**given))
    if before.writing is not None:
        before.writing.join()
    return backend


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", ["w8a8", "w4a8", "bf16"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_second_start_computes_the_same_bits_and_packs_nothing(kept, model, isa, weight_format, num_threads):
    weights = four_bit(random_weights(SPECS[NAME]), "q4_1") if weight_format == "w4a8" else random_weights(SPECS[NAME])
    options = {"weight_format": weight_format, "isa": isa, "num_threads": num_threads}
    first = all_logits(opened(kept, model, weights, **options), *ragged(STEP)).tolist()
    second = opened(kept, model, Unread(weights.values), **options)
    assert all_logits(second, *ragged(STEP)).tolist() == first


def test_what_a_file_holds_in_many_forms_is_kept_like_any_other(kept, model):
    def start(weights: MemoryWeights) -> list[list[float]]:
        packed = Packed(kept, model, stamp(str(model)), worth_bytes=0)
        backend = CpuBackend(MIXED, weights, 64, CpuOptions("stored", num_threads=3, packed=packed))
        if packed.writing is not None:
            packed.writing.join()
        return all_logits(backend, *ragged(STEP)).tolist()

    first = start(mixed_weights())
    assert start(Unread(mixed_weights().values, mixed_weights().blocks)) == first


def test_the_weights_of_two_processes_are_the_same_pages(kept, model):
    opened(kept, model, random_weights(SPECS[NAME]))
    backend = opened(kept, model, Unread(random_weights(SPECS[NAME]).values))
    (entry,) = kept.entries()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(entry.path) in line]
    assert backend is not None
    assert [(line[1], int(line[2], 16)) for line in lines] == [("r--s", DATA_OFFSET)]


def test_a_model_that_changed_is_packed_anew(kept, model):
    opened(kept, model, random_weights(SPECS[NAME]))
    model.write_bytes(b"GGUF" * 99)
    other = random_weights(SPECS[NAME], seed=2)
    found = all_logits(opened(kept, model, other), *ragged(STEP)).tolist()
    alone = CpuBackend(SPECS[NAME], other, 64, CpuOptions(num_threads=2))
    assert found == all_logits(alone, *ragged(STEP)).tolist()
    assert len(kept.entries()) == 2


def test_a_file_that_is_replaced_while_its_model_is_loaded_leaves_nothing_behind(kept, model):
    before = Packed(kept, model, stamp(str(model)), worth_bytes=0)
    model.write_bytes(b"GGUF" * 99)  # a process that had opened the file before reads the old weights
    CpuBackend(SPECS[NAME], random_weights(SPECS[NAME]), 64, CpuOptions(num_threads=2, packed=before))
    assert before.writing is None
    assert kept.entries() == []


def test_a_file_that_is_replaced_while_it_is_packed_is_not_kept(kept, model):
    class Replacing(MemoryWeights):
        def tensor(self, name):
            model.write_bytes(b"GGUF" * 99)
            return super().tensor(name)

    before = Packed(kept, model, stamp(str(model)), worth_bytes=0)
    weights = Replacing(random_weights(SPECS[NAME]).values)
    CpuBackend(SPECS[NAME], weights, 64, CpuOptions(num_threads=2, packed=before))
    assert before.writing is None
    assert kept.entries() == []


def test_code_that_packs_otherwise_finds_nothing(kept, model, monkeypatch):
    weights = random_weights(SPECS[NAME])
    opened(kept, model, weights)
    monkeypatch.setattr(packed, "_recipe", lambda: "of another release")
    opened(kept, model, weights)
    assert len(kept.entries()) == 2


def test_the_recipe_covers_every_file_that_decides_a_packed_byte():
    files = {path.name for path in packed.recipe_files()}
    assert {
        "cpu.py",
        "packer.py",
        "program.py",
        "expert_program.py",
        "source.py",
        "gguf.py",
        "safetensors.py",
        "qwen.py",
        "spec.py",
        "quants.py",
    } <= files


def test_a_small_model_is_packed_as_fast_as_it_is_looked_for(kept, model):
    before = Packed(kept, model, stamp(str(model)))
    CpuBackend(SPECS[NAME], random_weights(SPECS[NAME]), 64, CpuOptions(num_threads=2, packed=before))
    assert kept.entries() == []


def test_without_a_home_that_can_be_written_to_a_model_is_loaded_all_the_same(tmp_path, model, caplog):
    (tmp_path / "file").touch()
    backend = opened(KeptWeights(tmp_path / "file" / "packed", 10**9), model, random_weights(SPECS[NAME]))
    assert all_logits(backend, *ragged(STEP)).shape[0] == 39
    assert len(caplog.records) == 1


WRITES = """
import sys
from pathlib import Path
from tests.engine.kernels.test_packed import NAME, SPECS, KeptWeights, opened, random_weights
opened(KeptWeights(Path(sys.argv[1]), 10**9), Path(sys.argv[2]), random_weights(SPECS[NAME]))
"""


def test_processes_that_write_the_same_at_once_leave_one_whole_file(kept, model):
    command = [sys.executable, "-W", "ignore", "-c", WRITES, str(kept.folder), str(model)]
    rivals = [subprocess.Popen(command) for _ in range(2)]
    assert [rival.wait() for rival in rivals] == [0, 0]
    (entry,) = kept.entries()
    assert kept.is_sound(entry)
    assert {path.suffix for path in kept.folder.iterdir() if path.is_file()} == {".packed"}
