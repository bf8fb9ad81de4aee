"""Packed weights kept between starts: which are kept, trusted and deleted, and what a faulty disk costs."""

import errno
import itertools
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.checkpoints.fingerprint import fingerprint
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.rank.kernels import build, kept
from kvloom.rank.kernels.kept import DATA_OFFSET, KeptWeights, Key, kept_weights, parts_of
from kvloom.rank.loading import open_runner
from tests.support.homeless import lose_home
from tests.support.models.checkpoints import save, tiny_model

GB = 10**9
KEY = Key("f" * 64, "w8a8", "avx2", "recipe", 2)
DATA = [memoryview(b"a" * 5000), memoryview(b"b" * 70)]
SIZE = 5070
OLD_S = 1_000_000_000


@pytest.fixture
def store(tmp_path):
    return KeptWeights(tmp_path / "packed", GB)


def other(number: int) -> Key:
    return Key(f"{number:064}", "w8a8", "avx2", "recipe", 2)


def test_what_was_kept_is_found_again_as_it_was(store):
    assert store.keep(KEY, DATA, "/models/mine")
    assert store.open(KEY, SIZE)[:] == b"a" * 5000 + b"b" * 70
    (entry,) = store.entries()
    assert (entry.model, entry.key, entry.num_bytes) == ("/models/mine", KEY, DATA_OFFSET + SIZE)
    assert store.is_sound(entry)
    assert [path.name for path in store.folder.iterdir()] == [KEY.file_name]  # no partial file is left


def test_the_folder_and_its_files_are_the_users_alone(store):
    store.keep(KEY, DATA, "")
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert (store.folder / KEY.file_name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "e" * 64},
        {"format": "w4a8"},
        {"isa": "avx512"},
        {"recipe": "of other code"},
        {"num_threads": 3},
    ],
)
def test_another_model_format_instruction_set_code_or_number_of_threads_finds_nothing(store, changed):
    store.keep(KEY, DATA, "")
    fields = {name: getattr(KEY, name) for name in KEY.__struct_fields__}
    assert store.open(Key(**{**fields, **changed}), SIZE) is None


def test_a_file_under_anothers_name_is_not_taken(store, caplog):
    store.keep(other(1), DATA, "")
    (store.folder / other(1).file_name).rename(store.folder / KEY.file_name)
    assert store.open(KEY, SIZE) is None
    assert len(caplog.records) == 1


def exchange(one: Path, two: Path) -> None:
    """Gives each of two files the other's bytes."""
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def test_two_good_files_that_were_exchanged_are_noticed(store, caplog):
    names = []
    for number in (1, 2):
        store.keep(other(number), [memoryview(bytes([number]) * SIZE)], "")
        names.append(store.folder / other(number).file_name)
    exchange(*names)
    assert [store.open(other(number), SIZE) for number in (1, 2)] == [None, None]
    assert len(caplog.records) == 2


def test_the_weights_of_one_behind_the_header_of_another_are_noticed(store, caplog):
    paths = []
    for number in (1, 2):
        store.keep(other(number), [memoryview(bytes([number]) * SIZE)], "")
        paths.append(store.folder / other(number).file_name)
    one, two = (path.read_bytes() for path in paths)
    paths[0].write_bytes(one[:DATA_OFFSET] + two[DATA_OFFSET:])
    assert store.open(other(1), SIZE) is None
    assert "holds other weights than it says; they are packed again" in caplog.text


@pytest.mark.parametrize("cuts", [(), (1,), (4095, 4097), (70_000, 70_001, 400_000)])
def test_every_cut_into_pieces_is_opened(store, cuts):
    data = os.urandom(500_000)
    ends = [0, *cuts, len(data)]
    pieces = [memoryview(data)[begin:end] for begin, end in itertools.pairwise(ends)]
    assert store.keep(KEY, pieces, "")
    assert store.open(KEY, len(data))[:] == data


def test_another_size_than_the_model_asks_for_is_not_taken(store):
    store.keep(KEY, DATA, "")
    assert store.open(KEY, SIZE + 1) is None


def cut(path: Path) -> None:
    os.truncate(path, DATA_OFFSET + SIZE - 1)


def lengthen(path: Path) -> None:
    os.truncate(path, DATA_OFFSET + SIZE + 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def spoil_the_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(40)
        file.write(b"?")


def claim_a_long_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\xff")


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def put_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [cut, lengthen, empty, spoil_the_header, claim_a_long_header, open_to_all, put_a_link, put_a_folder],
)
def test_a_damaged_or_foreign_file_is_not_taken_and_the_log_says_so_once(store, damage, caplog):
    store.keep(KEY, DATA, "")
    damage(store.folder / KEY.file_name)
    assert store.open(KEY, SIZE) is None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_what_is_packed_again_replaces_a_damaged_file(store):
    store.keep(KEY, DATA, "")
    cut(store.folder / KEY.file_name)
    assert store.entries()[0].key is None
    assert store.keep(KEY, DATA, "")
    assert store.open(KEY, SIZE)[:1] == b"a"


def test_changed_data_are_found_by_their_checksum(store):
    store.keep(KEY, DATA, "")
    with (store.folder / KEY.file_name).open("r+b") as file:
        file.seek(DATA_OFFSET + 7)
        file.write(b"?")
    assert not store.is_sound(store.entries()[0])


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(store, mode, caplog):
    store.keep(KEY, DATA, "")
    store.folder.chmod(mode)
    assert store.open(KEY, SIZE) is None
    assert not store.keep(other(1), DATA, "")
    assert "not this user's own" in caplog.text


def test_a_folder_or_a_file_of_another_user_is_not_trusted(store, monkeypatch, caplog):
    store.keep(KEY, DATA, "")
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    assert store.open(KEY, SIZE) is None
    assert not store.keep(other(1), DATA, "")
    assert "not this user's own" in caplog.text


def test_the_one_used_longest_ago_goes_when_room_is_needed(tmp_path):
    store = KeptWeights(tmp_path / "packed", 3 * (DATA_OFFSET + SIZE))
    for number in range(3):
        store.keep(other(number), DATA, "")
        os.utime(store.folder / other(number).file_name, (OLD_S, OLD_S + number))
    store.open(other(0), SIZE)  # now used: 1 becomes the oldest
    store.keep(other(3), DATA, "")
    assert {entry.key for entry in store.entries()} == {other(0), other(2), other(3)}


def test_what_is_larger_than_all_that_may_be_kept_is_not_kept_and_nothing_goes_for_it(tmp_path, caplog):
    store = KeptWeights(tmp_path / "packed", DATA_OFFSET + SIZE)
    store.keep(KEY, DATA, "")
    assert not store.keep(other(1), [*DATA, memoryview(b"x")], "")
    assert [entry.key for entry in store.entries()] == [KEY]
    assert len(caplog.records) == 1


def test_half_of_what_the_disk_has_free_stays_free(store, monkeypatch):
    store.keep(KEY, DATA, "")
    free = 100 * (DATA_OFFSET + SIZE)
    found = os.statvfs(store.folder)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, *found[2:4], free, *found[5:10])))
    assert store.limit_bytes() == (free + DATA_OFFSET + SIZE) // 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_costs_one_line_and_leaves_nothing(store, number, monkeypatch, caplog):
    written = []

    def write(fd: int, data: memoryview) -> int:
        if written:
            raise OSError(number, os.strerror(number))
        written.append(len(data))
        return len(data)

    monkeypatch.setattr(kept.os, "write", write)
    assert not store.keep(KEY, DATA, "")
    (record,) = caplog.records
    assert os.strerror(number) in record.getMessage()
    assert list(store.folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = KeptWeights(tmp_path / "file" / "packed", GB)
    assert not store.keep(KEY, DATA, "")
    assert len(caplog.records) == 1


def test_a_kept_file_of_a_folder_that_has_become_read_only_is_used(store, monkeypatch):
    store.keep(KEY, DATA, "")

    def utime(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(kept.os, "utime", utime)
    assert store.open(KEY, SIZE)[:1] == b"a"


def test_parts_of_processes_that_ended_are_removed_and_those_being_written_stay(store):
    store.keep(KEY, DATA, "")
    abandoned, fresh = store.folder / "x.packed.1.part", store.folder / "y.packed.2.part"
    for part in (abandoned, fresh):
        part.touch()
    os.utime(abandoned, (OLD_S, OLD_S))
    store.keep(other(1), DATA, "")
    assert not abandoned.exists()
    assert fresh.exists()


def test_clearing_removes_all_and_who_has_it_mapped_goes_on(store):
    store.keep(KEY, DATA, "")
    mapped = store.open(KEY, SIZE)
    assert store.clear() == DATA_OFFSET + SIZE
    assert store.entries() == []
    assert mapped[:1] == b"a"


# -- remembered fingerprints


@pytest.fixture
def model(tmp_path):
    """A model file; with the fixture `later`, one that has not been written to for a long time."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 1000)
    return path


@pytest.fixture
def later(monkeypatch):
    """Sets the clock to long after the files were written."""
    monkeypatch.setattr(kept.time, "time", lambda: 4e9)


def test_a_model_is_read_once_and_again_when_it_changed(store, model, later, monkeypatch):
    reads = []

    def counted(path: Path) -> str:
        reads.append(path)
        return fingerprint(path)

    monkeypatch.setattr(kept, "fingerprint", counted)
    first = store.fingerprint(model)
    assert store.fingerprint(model) == first == fingerprint(model)
    assert len(reads) == 1
    model.write_bytes(b"GGUF" * 999 + b"????")
    assert store.fingerprint(model) == fingerprint(model) != first
    assert len(reads) == 2


def test_the_fingerprint_of_files_that_were_just_written_is_not_remembered(store, model):
    assert store.fingerprint(model) == fingerprint(model)
    assert not store.folder.exists()


@pytest.mark.parametrize("text", ["", "f" * 63, "/" * 64])
def test_a_damaged_memory_is_read_anew(store, model, later, text):
    store.fingerprint(model)
    (stamp,) = (store.folder / "stamps").iterdir()
    stamp.write_text(text)
    assert store.fingerprint(model) == fingerprint(model)


def test_the_memories_of_two_models_that_were_exchanged_are_noticed(store, model, later, tmp_path):
    second = tmp_path / "second.gguf"
    second.write_bytes(b"GGUF" * 1001)
    wanted = [store.fingerprint(path) for path in (model, second)]
    exchange(*(store.folder / "stamps").iterdir())
    assert [store.fingerprint(path) for path in (model, second)] == wanted


def test_a_memory_alone_leaves_the_folder_to_its_user(store, model, later):
    store.fingerprint(model)
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_fingerprints_go_with_their_weights(store, model, later):
    weights = store.fingerprint(model)
    store.keep(Key(weights, "w8a8", "avx2", "recipe", 2), DATA, "")
    assert len(list((store.folder / "stamps").iterdir())) == 1
    store.clear()
    assert list((store.folder / "stamps").iterdir()) == []


# -- the folder and its size


@pytest.mark.parametrize(
    ("environ", "given", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "", "/c/kvloom/packed"),
        ({"XDG_CACHE_HOME": "/c", "KVLOOM_WEIGHT_CACHE": "/mine"}, "", "/mine"),
        ({"KVLOOM_WEIGHT_CACHE": "/mine"}, "/given", "/given"),
        ({"KVLOOM_WEIGHT_CACHE": "off"}, "/given", "/given"),
    ],
)
def test_where_weights_are_kept(environ, given, folder):
    found = kept_weights(environ, given)
    assert found is not None
    assert str(found.folder) == folder


@pytest.mark.parametrize(("environ", "given"), [({"KVLOOM_WEIGHT_CACHE": "off"}, ""), ({}, "off")])
def test_keeping_can_be_turned_off(environ, given):
    assert kept_weights(environ, given) is None


def test_for_a_user_without_a_home_weights_are_not_kept(tmp_path, monkeypatch, caplog):
    library = build.library()
    monkeypatch.setattr(build, "library", lambda _isa: library)
    lose_home(monkeypatch)
    save(tiny_model("llama"), tmp_path)
    open_runner(EngineConfig(model=str(tmp_path), num_blocks=8), [], lambda _done, _total: None)
    told = "packed weights are not kept: ~/.cache: this user has no home folder: set HOME or XDG_CACHE_HOME"
    assert told in caplog.messages


def test_how_much_is_kept():
    assert kept_weights({"KVLOOM_WEIGHT_CACHE_GB": "1.5", "HOME": "/h"}).max_bytes == 1_500_000_000


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan", "inf"])
def test_a_size_that_is_none_is_told(text):
    with pytest.raises(BadRequest, match="KVLOOM_WEIGHT_CACHE_GB: must be a number of gigabytes above 0"):
        kept_weights({"KVLOOM_WEIGHT_CACHE_GB": text})


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 16))
def test_packed_bytes_are_written_in_parts_that_lie_at_multiples_of_their_size(pieces, part_bytes):
    parts = [bytes(part) for part in parts_of([memoryview(piece) for piece in pieces], part_bytes)]
    starts = [sum(map(len, parts[:at])) for at in range(len(parts))]
    ends = {sum(map(len, pieces[:at])) for at in range(len(pieces))}
    assert b"".join(parts) == b"".join(pieces)
    assert all(0 < len(part) <= part_bytes for part in parts)
    assert all(start % part_bytes == 0 or start in ends for start in starts)
