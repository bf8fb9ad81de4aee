"""Where the kernels' library comes from (a wheel, the user's cache, the compiler), and what happens without one."""

import logging
import shutil
from functools import partial

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels import build
from kvloom.rank.loading import open_runner
from tests.support.compiling import runs_for_damaged, runs_for_two
from tests.support.homeless import lose_home
from tests.support.models.checkpoints import save, tiny_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user cache, and a PATH without a compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "cache"


def test_a_prebuilt_library_of_these_sources_is_taken(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "lib")
    path = tmp_path / "lib" / build.file_name("portable")
    path.parent.mkdir()
    path.touch()
    assert build.library("portable") == path


def test_a_user_without_a_home_takes_a_prebuilt_library_and_compiles_none(cache, tmp_path, monkeypatch):
    lose_home(monkeypatch)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "lib")
    assert build.found("portable") is None
    with pytest.raises(ModelError, match=r"are not compiled: ~/\.cache: this user has no home folder: set HOME"):
        build.library("portable")
    path = tmp_path / "lib" / build.file_name("portable")
    path.parent.mkdir()
    path.touch()
    assert build.library("portable") == path


def test_a_prebuilt_library_of_other_sources_is_not(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "lib")
    path = tmp_path / "lib" / build.file_name("portable")
    path.parent.mkdir()
    path.touch()
    sources = tmp_path / "cpu"
    sources.mkdir()
    (sources / "step.cpp").write_text("int changed;")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(ModelError, match="need a C\\+\\+ compiler"):
        build.library("portable")


def test_a_library_is_named_by_its_sources_in_every_folder(tmp_path, monkeypatch):
    sources = tmp_path / "cpu"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    names = {build.file_name("portable")}
    paths = sorted(path for path in sources.rglob("*") if path.is_file())
    for path in paths:
        path.write_text(path.read_text() + "// changed")
        names.add(build.file_name("portable"))
    assert len(names) == len(paths) + 1


def test_the_compiler_runs_once_for_all_who_come_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runs_for_two(build, "compile_library", partial(build.library, "portable"), monkeypatch) == 1


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ask = partial(build.library, "portable")
    assert runs_for_damaged(build, "compile_library", ask, monkeypatch) == [0, 1, 1, 1, 1]


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/kvloom/kernels: Not a directory; set XDG_CACHE_HOME to a folder"):
        build.library("portable")


def test_what_the_compiler_says_is_said(tmp_path, monkeypatch):
    (tmp_path / "step.cpp").write_text("int broken(")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(ModelError, match=r"do not compile with .*: .*step.cpp"):
        build.compile_library("portable", tmp_path / "out" / "x.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_of_much_that_a_compiler_says_the_reason_is_said_in_a_line(tmp_path, monkeypatch):
    noise = "as: BFD (GNU Binutils for Debian) 2.40 assertion fail elf.c:3108\\n"
    compiler = tmp_path / "full-disk"
    script = f"printf '{noise * 99}Fatal error: step.o: No space left on device\\n{noise * 99}' >&2; exit 1"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ModelError) as error:
        build.compile_library("portable", tmp_path / "out" / "x.so")
    said = f"the CPU kernels do not compile with {compiler}: Fatal error: step.o: No space left on device"
    assert str(error.value) == said


def test_without_library_and_compiler_the_reference_backend_runs_and_one_line_says_so(cache, tmp_path, caplog):
    model = str(save(tiny_model("qwen3"), tmp_path / "model"))
    with caplog.at_level(logging.INFO, "kvloom"):
        runner = open_runner(EngineConfig(model=model, num_blocks=16), [], lambda done, total: None)
    assert runner.info.backend == "reference"
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kvloom")]
    assert lines == [
        "the CPU kernels need a C++ compiler (g++ or clang++) once, and none was found; "
        "the slower torch backend is used instead"
    ]


def test_the_cpu_backend_asked_for_by_name_is_not_replaced(cache, tmp_path):
    model = str(save(tiny_model("qwen3"), tmp_path / "model"))
    with pytest.raises(ModelError, match="need a C\\+\\+ compiler"):
        open_runner(EngineConfig(model=model, backend="cpu", num_blocks=16), [], lambda done, total: None)
