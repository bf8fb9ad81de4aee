"""`kvloom config init`: what it lays beside conf/, and the folders that it cannot make."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.contract.errors import BadRequest


def init(path: str) -> None:
    done = CliRunner().invoke(app, ["config", "init", path])
    if done.exception:
        raise done.exception


def run(*command: str, folder: Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "a home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    init("conf/config.json")
    return folder


def test_the_documents_scripts_find_the_commands_in_their_places(home):
    assert "Serve the models" in run("./bin/mindieservice_daemon", "--help", folder=home)
    another = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    script = "scripts/config_mindie_server_tls_cert.py"
    assert "usage: config_mindie_server_tls_cert.py" in run(another, script, "--help", folder=home)
    shown = run("bash", "-c", '. ./set_env.sh; echo "$MIES_INSTALL_PATH"; command -v mindieservice_daemon', folder=home)
    assert shown.splitlines() == [str(home), str(Path(sys.executable).parent / "mindieservice_daemon")]


def test_what_is_there_already_stays(home):
    (home / "set_env.sh").write_text("mine")
    (home / "bin" / "llm_engine_test").unlink()
    (home / "bin" / "llm_engine_test").symlink_to("/nowhere")
    (home / "conf" / "config.json").unlink()
    init("conf/config.json")
    assert (home / "set_env.sh").read_text() == "mine"
    assert str((home / "bin" / "llm_engine_test").readlink()) == "/nowhere"


def test_a_file_elsewhere_stands_alone(tmp_path):
    init(str(tmp_path / "config.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("afile/config.json", r"afile/config.json: cannot be written: \S*afile is no folder$"),
        ("afile/conf/config.json", r"afile/conf/config.json: cannot be written: Not a directory$"),
        ("afile", "is there already; give another name, or --force$"),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, path, problem):
    (tmp_path / "afile").write_text("")
    with pytest.raises(BadRequest, match=problem):
        init(str(tmp_path / path))
