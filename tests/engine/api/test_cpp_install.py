"""The Engine API's library as C++ developers install it: below a prefix, by pkg-config, by $(kvloom engine ...)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.contract.sampling import SamplingParams
from kvloom.engine_api.build import LIBRARY
from kvloom.rank.fake import fake_answer
from tests.support.compiling import cache_with, compiled, hasty_compiler
from tests.support.engine.cpp import write_config
from tests.support.pages import run_as_user

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "engine_api.cpp"
PAGE = EXAMPLE.parents[1] / "docs" / "engine-api.md"
LAID = {
    "lib/libkvloom_engine.so.1",
    "lib/libkvloom_engine.so",
    "lib/pkgconfig/kvloom_engine.pc",
    "libexec/kvloom-engine-host",
    *(f"include/{header.relative_to(LIBRARY.include)}" for header in LIBRARY.include.rglob("*.h")),
}
COMMAND = "from kvloom.cli import main; main()"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with the compiled library in the cache, no data folder yet, and no kvloom on PATH."""
    own = {"XDG_CACHE_HOME": str(cache_with(LIBRARY, tmp_path)), "XDG_DATA_HOME": str(tmp_path / "data")}
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "kvloom").exists()
    )
    return {**os.environ, **own, "PATH": path}


def run_cli(environ: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", COMMAND, "engine", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def compiled_example() -> Path:
    """The object file of the example, compiled with our own headers."""
    headers = LIBRARY.include / "kvloom_engine"
    return compiled(["c++", "-std=c++11", f"-I{headers}", "-idirafter", headers / "sample", "-c", EXAMPLE], "example.o")


def run_example(folder: Path, source: Path, flags: str, environ: dict[str, str]) -> str:
    """Compiles or links `source` (C++ or an object file) with `flags`; returns the program's output for ten prompts."""
    program, data = folder / "example", folder / "data.csv"
    subprocess.run(["c++", "-std=c++11", source, "-o", program, *flags.split()], check=True)
    data.write_text("".join(f"1,{i},{i + 1}\n" for i in range(10)))
    command = [program, write_config(folder), data]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_answers(printed: str) -> None:
    answers = dict(line.split(";")[0].split(":") for line in printed.splitlines() if "; flag" in line)
    assert sorted(answers, key=int) == [str(row) for row in range(10)]
    for row, ids in answers.items():
        wanted = fake_answer([1, int(row), int(row) + 1], SamplingParams(temperature=0), 0, 16)
        wanted = wanted[: wanted.index(257) + 1] if 257 in wanted else wanted
        assert [int(id) for id in ids.split()] == wanted


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_what_is_laid_down_below_a_prefix_is_compiled_first(environ, tmp_path):
    prefix = tmp_path / "prefix"
    shutil.rmtree(environ["XDG_CACHE_HOME"])
    printed = run_cli({**environ, "CXX": str(hasty_compiler(tmp_path))}, "install", "--prefix", str(prefix))
    assert files_below(prefix) == LAID
    assert {str(Path(line).relative_to(prefix)) for line in printed.splitlines()} == LAID
    assert os.access(prefix / "libexec" / "kvloom-engine-host", os.X_OK)


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_a_program_built_by_pkg_config_finds_its_host(environ, tmp_path):
    prefix = tmp_path / "prefix"
    run_cli(environ, "install", "--prefix", str(prefix))
    search = {**environ, "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    command = ["pkg-config", "--cflags", "--libs", "kvloom_engine"]
    flags = subprocess.run(command, env=search, capture_output=True, text=True, check=True).stdout
    check_answers(run_example(tmp_path, EXAMPLE, flags, environ))


def test_a_program_built_by_the_command_runs_without_the_cache(environ, tmp_path):
    flags = run_cli(environ, "--cflags", "--libs")
    shutil.rmtree(environ["XDG_CACHE_HOME"])
    check_answers(run_example(tmp_path, compiled_example(), flags, environ))


def test_without_a_host_of_its_own_it_is_the_kvloom_of_the_path(environ, tmp_path):
    flags = run_cli(environ, "--cflags", "--libs")
    (tmp_path / "data" / "kvloom" / "engine_api" / "libexec" / "kvloom-engine-host").unlink()
    command = tmp_path / "bin" / "kvloom"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{COMMAND}\n")
    command.chmod(0o700)
    path = f"{command.parent}{os.pathsep}{environ['PATH']}"
    check_answers(run_example(tmp_path, compiled_example(), flags, {**environ, "PATH": path}))


def test_headers_with_common_names_do_not_hide_those_of_a_program(environ, tmp_path):
    """The document's example includes util.h and metrics.h; a program with such headers of its own gets those."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "util.h").write_text("#define OWN 1\n")
    source = tmp_path / "own.cpp"
    source.write_text('#include <infer_engine.h>\n#include <util.h>\nstatic_assert(OWN == 1, "");\n')
    flags = run_cli(environ, "--cflags").split()
    subprocess.run(["c++", "-fsyntax-only", source, *flags, f"-I{tmp_path / 'own'}"], check=True)


def wanted_of_the_documents() -> list[int]:
    """The tokens of the answer that the documents' programs print."""
    wanted = fake_answer(list(b"The capital of France is"), SamplingParams(temperature=0), 0, 16)
    return wanted[: wanted.index(257) + 1] if 257 in wanted else wanted


def block_of_the_documents(kind: str) -> str:
    return PAGE.read_text().partition(f"```{kind}\n")[2].partition("```")[0]


def test_the_program_of_the_documents_runs(environ, tmp_path):
    (tmp_path / "first.cpp").write_text(block_of_the_documents("cpp"))
    (tmp_path / "conf").mkdir()
    write_config(tmp_path / "conf")
    flags = run_cli(environ, "--cflags", "--libs").split()
    subprocess.run(["c++", "-std=c++11", "first.cpp", "-o", "first", *flags], cwd=tmp_path, check=True)
    done = subprocess.run(["./first"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.splitlines()] == wanted_of_the_documents()


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_the_commands_of_the_documents_do_what_they_say(environ, tmp_path):
    (tmp_path / "first.cpp").write_text(block_of_the_documents("cpp"))
    (tmp_path / "conf").mkdir()
    write_config(tmp_path / "conf")
    script = block_of_the_documents("sh") + "./first\n"
    done = run_as_user(script, tmp_path, environ)
    assert done.returncode == 0, done.stderr
    printed = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert printed == wanted_of_the_documents() * 2
    assert files_below(tmp_path / ".local") == LAID


def test_the_python_program_of_the_documents_prints_the_answer(environ, tmp_path):
    (tmp_path / "conf").mkdir()
    write_config(tmp_path / "conf")
    command = [sys.executable, "-c", block_of_the_documents("python")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=100)
    tokens = [token for line in done.stdout.splitlines() for token in json.loads(line)]
    assert tokens == wanted_of_the_documents()
