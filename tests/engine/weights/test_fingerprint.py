"""The name of a model's weights: the same for copies, another for any other."""

import random
from pathlib import Path

import pytest

from kvloom.engine.weights.fingerprint import fingerprint

SIZE = 12 << 20  # several pieces


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


@pytest.mark.parametrize("place", [0, 5000, (1 << 20) + 10, 7_654_321, SIZE - 1])
def test_one_changed_bit_anywhere_is_seen(tmp_path, place):
    before = fingerprint(folder(tmp_path / "a"))
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 1]))
    assert fingerprint(tmp_path / "a") != before
