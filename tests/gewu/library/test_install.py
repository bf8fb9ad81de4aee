"""The library as a C developer gets it: below a prefix, by pkg-config, and by $(kvloom gewu --cflags --libs)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.gewu.build import INCLUDE, LIBRARY, SONAME
from kvloom.native.build import BuildError, NativeLibrary
from kvloom.native.install import Development
from tests.support.compiling import cache_with, runs_for_damaged, runs_for_two
from tests.support.gewu.daemons import DaemonProcess, run_program
from tests.support.homeless import lose_home
from tests.support.pages import run_as_user

CHAT = Path(__file__).parents[3] / "examples" / "gewu" / "chat.c"
LAID = {
    "lib/libqos.so.1",
    "lib/libqos.so",
    "lib/pkgconfig/qos.pc",
    *(f"include/{header.relative_to(INCLUDE)}" for header in INCLUDE.rglob("*.h")),
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose cache holds only the compiled library and who has no data yet."""
    own = {"XDG_CACHE_HOME": str(cache_with(LIBRARY, tmp_path)), "XDG_DATA_HOME": str(tmp_path / "data")}
    return {**os.environ, **own}


def run_cli(environ: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "kvloom.gewu", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def compile_chat(folder: Path, flags: str) -> Path:
    program = folder / "chat"
    subprocess.run(["cc", CHAT, "-o", program, *flags.split()], check=True)
    return program


def dynamic_entries(file: Path, kind: str) -> list[str]:
    """Values of NEEDED, SONAME or RUNPATH."""
    done = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True)
    return [line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if f"({kind})" in line]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_what_is_laid_down_below_a_prefix_is_compiled_first(environ, tmp_path):
    prefix = tmp_path / "prefix"
    shutil.rmtree(environ["XDG_CACHE_HOME"])
    printed = run_cli(environ, "install", "--prefix", str(prefix))
    assert files_below(prefix) == LAID
    assert {str(Path(line).relative_to(prefix)) for line in printed.splitlines()} == LAID
    assert (prefix / "lib" / "libqos.so").readlink() == Path(SONAME)
    assert dynamic_entries(prefix / "lib" / "libqos.so", "SONAME") == [SONAME]


def test_a_prefix_may_be_no_utf_8(tmp_path):
    prefix = tmp_path / "\udcff"
    Development(LIBRARY, "qos", "x").install(prefix)
    first = (prefix / "lib/pkgconfig/qos.pc").read_bytes().splitlines()[0]
    assert first == b"prefix=" + os.fsencode(tmp_path) + b"/\xff"


def test_a_package_is_made_of_a_destdir(environ, tmp_path):
    run_cli(environ, "install", "--prefix", "/usr", "--destdir", str(tmp_path / "package"))
    assert files_below(tmp_path / "package") == {f"usr/{path}" for path in LAID}
    text = (tmp_path / "package/usr/lib/pkgconfig/qos.pc").read_text()
    assert "prefix=/usr\n" in text
    assert "rpath" not in text  # the loader searches this folder by default


def test_a_second_time_changes_nothing(environ, tmp_path):
    """Otherwise make would build again."""
    prefix = tmp_path / "prefix"
    run_cli(environ, "install", "--prefix", str(prefix))
    headers = [path for path in (prefix / "include").rglob("*.h")] + [prefix / "lib" / SONAME]
    before = [path.stat().st_ino for path in headers]
    run_cli(environ, "install", "--prefix", str(prefix))
    assert [path.stat().st_ino for path in headers] == before


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_a_program_built_by_pkg_config_runs(environ, tmp_path, daemon: DaemonProcess, model):
    prefix = tmp_path / "prefix"
    run_cli(environ, "install", "--prefix", str(prefix))
    shutil.rmtree(environ["XDG_CACHE_HOME"])
    search = {**environ, "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    command = ["pkg-config", "--cflags", "--libs", "qos"]
    flags = subprocess.run(command, env=search, capture_output=True, text=True, check=True).stdout
    run_program(compile_chat(tmp_path, flags), daemon, str(model))


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_the_commands_of_the_documents_do_what_they_say(environ, tmp_path, daemon: DaemonProcess, model):
    page = (CHAT.parents[2] / "docs" / "gewu.md").read_text()
    [script] = [block for block in page.split("```sh\n") if block.startswith("kvloom gewu install")]
    shutil.copy(CHAT, tmp_path)
    done = run_as_user(script.partition("```")[0], tmp_path, environ)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path / ".local") == LAID
    assert files_below(tmp_path / "package") == {f"usr/{path}" for path in LAID}
    run_program(tmp_path / "chat", daemon, str(model))


def test_a_program_built_by_the_command_runs_without_the_cache(environ, tmp_path, daemon: DaemonProcess, model):
    flags = run_cli(environ, "--cflags", "--libs")
    program = compile_chat(tmp_path, flags)
    shutil.rmtree(environ["XDG_CACHE_HOME"])
    run_program(program, daemon, str(model))
    assert SONAME in dynamic_entries(program, "NEEDED")
    assert dynamic_entries(program, "RUNPATH") == [f"{environ['XDG_DATA_HOME']}/kvloom/gewu/lib"]


def test_the_compiler_runs_once_for_all_who_come_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runs_for_two(NativeLibrary, "compile", LIBRARY.path, monkeypatch) == 1


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runs_for_damaged(NativeLibrary, "compile", LIBRARY.path, monkeypatch) == [0, 1, 1, 1, 1]


def test_what_cannot_be_installed_is_said_in_one_line(environ, tmp_path):
    (tmp_path / "file").touch()
    for prefix, extra, said in (
        (tmp_path / "file", {}, "Not a directory"),
        (tmp_path / "prefix", {"CC": "no-such-compiler"}, "there is no C compiler 'no-such-compiler'"),
    ):
        shutil.rmtree(environ["XDG_CACHE_HOME"], ignore_errors=True)
        command = [sys.executable, "-m", "kvloom.gewu", "install", "--prefix", str(prefix)]
        done = subprocess.run(command, env={**environ, **extra}, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert said in done.stderr


def test_a_user_without_a_home_is_told_which_variable_names_the_data(monkeypatch):
    lose_home(monkeypatch)
    with pytest.raises(OSError, match=r"this user has no home folder: set HOME or XDG_DATA_HOME: '~/\.local/share'"):
        Development(LIBRARY, "qos", "").data_prefix(os.environ)


def test_of_much_that_a_compiler_says_the_reason_is_said_in_a_line(tmp_path, monkeypatch):
    compiler = tmp_path / "full-disk"
    compiler.write_text("#!/bin/sh\necho 'In file included' >&2\necho 'fatal: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildError) as caught:
        LIBRARY.compile(tmp_path / "lib" / SONAME)
    assert str(caught.value) == f"compiling {SONAME} with {compiler} failed: fatal: No space left on device"
