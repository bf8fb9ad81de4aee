"""GGUF models in several files: all parts are opened by the name of the first, and what does not fit is named."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.facts import facts_of
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.fingerprint import fingerprint, stamp
from kvloom.checkpoints.part_names import first_part, is_later_part, model_name, named_parts
from kvloom.contract.errors import ModelError
from tests.engine.weights.test_gguf import gguf_name, tensors_of, write
from tests.support.models.checkpoints import tiny_model

COUNT = 3


def part_path(folder: Path, number: int, name: str = "m") -> Path:
    return folder / f"{name}-{number:05}-of-{COUNT:05}.gguf"


def split(whole: Path, folder: Path, name: str = "m", **changed: Any) -> Path:
    """The model of a file in three, as gguf-split writes them. `changed`: keys of the split's metadata."""
    reader = gguf.GGUFReader(whole)
    shares = np.array_split(np.arange(len(reader.tensors)), COUNT)
    for index, share in enumerate(shares):
        writer = gguf.GGUFWriter(part_path(folder, index + 1, name), "llama")
        if index == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", COUNT)
        writer.add_int32("split.tensors.count", changed.get("tensors", len(reader.tensors)))
        for at in share:
            tensor = reader.tensors[at]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return part_path(folder, 1, name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whole and in three parts."""
    folder = tmp_path_factory.mktemp("parts")
    split(write(folder / "whole.gguf", tiny_model("llama"), "llama", "Q8_0"), folder)
    return folder


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> Path:
    """A folder with the parts alone."""
    for number in range(1, COUNT + 1):
        shutil.copy(part_path(made, number), tmp_path)
    return tmp_path


def test_all_parts_are_opened_by_the_name_of_the_first(made: Path):
    whole, first = open_checkpoint(made / "whole.gguf"), open_checkpoint(part_path(made, 1))
    assert first.spec == whole.spec
    assert first.weights.names() == whole.weights.names()
    for name in whole.weights.names():
        assert np.array_equal(first.weights.tensor(name).float32(), whole.weights.tensor(name).float32())


def test_a_folder_of_parts_stands_for_the_model(parts: Path):
    assert find_weights(parts) == part_path(parts, 1)
    part_path(parts, 1).unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf, but not the first part of that model"):
        find_weights(parts)


def test_what_is_told_of_a_model_is_of_all_its_parts(made: Path, parts: Path):
    first, facts = part_path(parts, 1), facts_of(part_path(parts, 1))
    assert facts.num_parameters == facts_of(made / "whole.gguf").num_parameters
    assert facts.num_bytes == sum(path.stat().st_size for path in parts.iterdir())
    assert len(stamp(str(first))) == COUNT
    before = fingerprint(first)
    with part_path(parts, 3).open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))
    assert fingerprint(first) != before


def without_the_second(folder: Path) -> None:
    part_path(folder, 2).unlink()


def exchanged(folder: Path) -> None:
    shutil.copy(part_path(folder, 3), part_path(folder, 2))


def of_another_model(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    split(write(other / "whole.gguf", tiny_model("llama", num_hidden_layers=1), "llama"), other)
    shutil.copy(part_path(other, 3), part_path(folder, 3))


def miscounted(folder: Path) -> None:
    split(write(folder / "whole.gguf", tiny_model("llama"), "llama"), folder, tensors=99)


def renamed(folder: Path) -> None:
    part_path(folder, 1).rename(folder / "model.gguf")


def cut_short(folder: Path) -> None:
    with part_path(folder, 2).open("r+b") as file:
        file.truncate(part_path(folder, 2).stat().st_size - 64)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_the_second, r": is the first of 3 parts, of which m-00002-of-00003\.gguf is missing"),
        (exchanged, r"m-00001-of-00003\.gguf: its part m-00002-of-00003\.gguf says that it is part 3 of 3"),
        (of_another_model, r": tensor [\w.]+ is in m-00002-of-00003\.gguf and in m-00003-of-00003\.gguf"),
        (miscounted, r"m-00001-of-00003\.gguf: its parts hold 21 tensors, it says 99; they are of different models"),
        (renamed, r"model\.gguf: is the first of 3 parts, so its name must end in -00001-of-00003\.gguf"),
        (cut_short, r"m-00002-of-00003\.gguf: cut short: tensor [\w.]+ lies behind the end of the file"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(parts: Path, damage: Callable[[Path], None], words: str):
    damage(parts)
    path = part_path(parts, 1)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(path if path.exists() else parts / "model.gguf")


def test_another_part_than_the_first_says_which_to_name(parts: Path):
    with pytest.raises(ModelError, match=r"is part 2 of 3 of a model; name the first one, .*/m-00001-of-00003\.gguf"):
        open_checkpoint(part_path(parts, 2))


def test_a_tensor_in_two_parts_is_named(parts: Path):
    model = tiny_model("llama")
    name, data = next(iter(tensors_of(model, "llama")))
    writer = gguf.GGUFWriter(part_path(parts, 3), "llama")
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", COUNT)
    writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r": tensor token_embd\.weight is in m-0000[12].* and in m-00003"):
        open_checkpoint(part_path(parts, 1))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _tensor(name: str, offset: int) -> bytes:
    return _text(name) + struct.pack("<IQIQ", 1, 8, 0, offset)


@pytest.mark.parametrize(
    ("pairs", "tensors", "words"),
    [
        ([("a", 1), ("a", 2)], [], "key a is there twice"),
        ([("a", 1)], [("t", 0), ("t", 32)], "tensor t is there twice"),
        ([("a", 1)], [("t", 0), ("u", 0)], "tensor u begins inside of tensor t"),
    ],
)
def test_what_is_there_twice_is_named(tmp_path: Path, pairs: list[Any], tensors: list[Any], words: str):
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    data += b"".join(_text(key) + struct.pack("<II", 4, value) for key, value in pairs)
    data += b"".join(_tensor(*each) for each in tensors)
    (tmp_path / "m.gguf").write_bytes(data + bytes(128))
    with pytest.raises(ModelError, match=words):
        open_checkpoint(tmp_path / "m.gguf")


def test_names_of_parts():
    first = Path("a/b-00001-of-00002.gguf")
    assert named_parts(first) == [first, Path("a/b-00002-of-00002.gguf")]
    assert first_part(Path("a/b-00002-of-00002.gguf")) == first
    assert [is_later_part(name) for name in ("b-00002-of-00002.gguf", first.name, "b.gguf")] == [True, False, False]
    for name in ("b.gguf", "b-00002-of-00002.gguf", "b-00001-of-00000.gguf", "b-1-of-2.gguf"):
        assert named_parts(Path(name)) == [Path(name)]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("a/Llama-3.1-8B.Q4_K_M.gguf", "Llama-3.1-8B.Q4_K_M"),
        ("a/qwen2.5-7b-q4_k_m-00001-of-00002.gguf", "qwen2.5-7b-q4_k_m"),
    ],
)
def test_a_model_is_named_by_its_folder_or_file(path: str, name: str):
    assert model_name(Path(path)) == name
