"""The fingerprint of a model's weights: copies have the same one, any other weights another."""

import random
from pathlib import Path

import pytest

from kvloom.checkpoints.fingerprint import fingerprint, stamp
from kvloom.contract.errors import ModelError

SIZE = 12 << 20  # bytes: read in several pieces


def folder(path: Path, seed: int = 1, config: str = "{}", size: int = SIZE) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    return path


def test_copies_of_a_model_share_their_name_wherever_they_lie(tmp_path):
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    (second / "README.md").write_text("not part of the weights")
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 64
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" * 1000)
    assert fingerprint(tmp_path / "one.gguf") == fingerprint(tmp_path / "two.gguf")


@pytest.mark.parametrize("fields", [{"seed": 2}, {"config": '{"a": 1}'}, {"size": SIZE - 1}])
def test_other_weights_another_shape_or_another_size_have_another_name(tmp_path, fields):
    assert fingerprint(folder(tmp_path / "a")) != fingerprint(folder(tmp_path / "b", **fields))


@pytest.mark.parametrize("offset", [0, 5000, (1 << 20) + 10, 7_654_321, SIZE - 1])
def test_one_changed_bit_anywhere_is_seen(tmp_path, offset):
    before = fingerprint(folder(tmp_path / "a"))
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))
    assert fingerprint(tmp_path / "a") != before


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "more.safetensors", "model.gguf"])
def test_every_file_that_may_hold_weights_or_choose_among_them_counts(tmp_path, name):
    before = fingerprint(folder(tmp_path / "a", size=100))
    (tmp_path / "a" / name).write_text("{}")
    assert fingerprint(tmp_path / "a") != before


def test_no_weights_have_no_name(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.gguf"):
        with pytest.raises(ModelError, match="holds no weights"):
            fingerprint(path)


def test_a_replaced_file_has_another_stamp_though_its_bytes_are_the_same(tmp_path):
    path = folder(tmp_path / "a", size=100)
    before = stamp(str(path))
    assert stamp(str(path)) == before
    assert [name for name, *_ in before] == ["config.json", "model.safetensors"]
    (path / "copy").write_bytes((path / "model.safetensors").read_bytes())
    (path / "copy").replace(path / "model.safetensors")
    assert stamp(str(path)) != before
