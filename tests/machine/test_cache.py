"""`kvloom cache` lists and removes cached packed weights."""

import json
import os

import pytest

from kvloom.rank.kernels.kept import DATA_OFFSET, KeptWeights, Key
from tests.support.commands import run_cli

KEY = Key("f" * 64, "w8a8", "avx2", "recipe", 2)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A cache with one model's packed weights, which the command finds."""
    monkeypatch.setenv("KVLOOM_WEIGHT_CACHE", str(tmp_path / "packed"))
    store = KeptWeights(tmp_path / "packed", 10**9)
    store.keep(KEY, [memoryview(b"weights")], "/models/mine.gguf")
    return store


def test_it_shows_what_is_kept(store):
    first, last = run_cli("cache").stdout.splitlines()
    assert first.split() == ["2", "MiB", "now", "w8a8", "avx2", "/models/mine.gguf"]
    assert last.split() == ["2", "MiB", "of", "at", "most", "19073", "in", str(store.folder)]


def test_as_json(store):
    found = json.loads(run_cli("cache", "--json").stdout)
    assert found["folder"] == str(store.folder)
    (entry,) = found["entries"]
    assert (entry["bytes"], entry["model"], entry["is_whole"]) == (DATA_OFFSET + 7, "/models/mine.gguf", True)


def test_it_clears(store):
    assert run_cli("cache", "clear").stdout == f"2 MiB removed from {store.folder}\n"
    assert store.entries() == []


def test_another_folder_can_be_named(store, tmp_path):
    result = run_cli("cache", "--folder", str(tmp_path / "nothing"))
    assert result.stdout.split()[:2] == ["0", "MiB"]
    assert store.entries()


@pytest.mark.parametrize("command", [[], ["verify"], ["clear"]])
def test_a_file_is_no_folder(command, tmp_path):
    (tmp_path / "file").touch()
    result = run_cli("cache", *command, "--folder", str(tmp_path / "file"))
    assert (result.returncode, result.stderr) == (1, f"kvloom: {tmp_path / 'file'}: Not a directory\n")


def test_a_damaged_file_is_shown_found_and_removed(store):
    assert run_cli("cache", "verify").returncode == 0
    with (store.folder / KEY.file_name).open("r+b") as file:
        file.seek(DATA_OFFSET)
        file.write(b"W")
    result = run_cli("cache", "verify")
    assert (result.returncode, result.stdout) == (1, f"{KEY.file_name}: is damaged; it was removed\n")
    assert store.entries() == []


def test_one_that_is_cut_short_is_shown(store):
    os.truncate(store.folder / KEY.file_name, 100)
    assert f"damaged: {KEY.file_name}" in run_cli("cache").stdout


@pytest.mark.parametrize("command", [(), ("clear",), ("verify",)])
def test_a_folder_of_others_is_one_line(store, command):
    store.folder.chmod(0o777)
    result = run_cli("cache", *command)
    assert result.returncode == 1
    assert "not this user's own" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_turned_off_it_says_so(store, monkeypatch):
    monkeypatch.setenv("KVLOOM_WEIGHT_CACHE", "off")
    result = run_cli("cache")
    assert result.returncode == 1
    assert 'KVLOOM_WEIGHT_CACHE: is "off"' in result.stderr
