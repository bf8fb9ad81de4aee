"""write_private replaces files whole, and nothing that is no file."""

import os
import stat

import pytest

from kvloom.writing import write_private


def test_a_file_is_replaced_and_its_owner_alone_reads_it(tmp_path):
    path = tmp_path / "folder" / "secret"
    write_private(path, b"old")
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["secret"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_private(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    """As devices do; to replace /dev/null would break every program of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        write_private(pipe, b"secret")
        assert reader.read() == b"secret"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write_private(tmp_path / "pipe", b"secret")


def test_a_folder_is_an_error_and_stays(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path, b"x")
    assert os.listdir(tmp_path) == []
