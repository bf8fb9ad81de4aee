"""Engines as plug-ins: kvloom's own, and one of another distribution (docs/engines.md)."""

import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from kvloom.contract import capabilities
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.opening import open_ranks
from kvloom.server.config import backends
from tests.support.models.byte_folder import make_byte_folder
from tests.support.processes import CLI, serving

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/engine_plugin"
HERE = "must name a back end that is installed (default, auto, cpu, torch, reference, mock, fake"


def install(folder: Path, name: str, value: str, module: str = "") -> Path:
    """Creates a distribution as pip installs it: its metadata, and a module if one is given."""
    meta = folder / f"{name}_plugin-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{backends.GROUP}]\n{name} = {value}\n")
    if module:
        (folder / f"{value.partition(':')[0]}.py").write_text(module)
    return folder


def test_kvlooms_own_entry_points_are_those_that_are_known_without_a_look():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][backends.GROUP] == backends.OWN


@pytest.mark.parametrize("name", ["auto", "reference", "fake", *backends.OWN])
def test_kvlooms_own_engines_can_be_opened_and_need_no_look_at_what_is_installed(name, monkeypatch):
    monkeypatch.setattr(backends.importlib.metadata, "entry_points", None)
    assert callable(backends.factory_of(backends.backend_of(name)))


def test_a_plug_in_is_found_by_its_name_in_any_case(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path, "Abacus", "abacus:open_engine", "def open_engine(*args): ..."))
    assert backends.backend_of("ABACUS") == "abacus"
    assert backends.factory_of("abacus").__module__ == "abacus"


def test_an_unknown_name_lists_those_that_are_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path, "abacus", "abacus:open_engine"))
    with pytest.raises(BadRequest) as raised:
        backends.named_backend("abcaus")
    assert str(raised.value).startswith(f"backend: {HERE}")
    assert "abacus;" in str(raised.value)
    assert str(raised.value).endswith('got "abcaus"')


@pytest.mark.parametrize("is_first", [True, False])
def test_nobody_else_can_take_the_name_of_kvlooms_own(tmp_path, monkeypatch, is_first):
    """Wherever the other distribution is on the path: of two entries of one name a naive lookup would take the last."""
    thief = str(install(tmp_path, "cpu", "thief:open_engine", "def open_engine(*args): ..."))
    monkeypatch.setattr(sys, "path", [thief, *sys.path] if is_first else [*sys.path, thief])
    assert backends.factory_of("cpu").__module__ == "kvloom.rank.opening"


@pytest.mark.parametrize(
    ("value", "module", "words"),
    [
        ("gone:open", "", "its plug-in gone:open cannot be imported: ModuleNotFoundError: No module named 'gone'"),
        ("ill:open", "raise RuntimeError('needs a\\nlicence')", "imported: RuntimeError: needs a licence"),
        ("bare:open", "x = 1", "cannot be imported: AttributeError: module 'bare' has no attribute 'open'"),
        ("odd:x", "x = 1", "its plug-in odd:x is no function that opens an engine"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_says_why_in_one_line(tmp_path, monkeypatch, value, module, words):
    monkeypatch.syspath_prepend(install(tmp_path, "abacus", value, module))
    with pytest.raises(ModelError) as raised:
        backends.factory_of("abacus")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_opens_ranks_itself_takes_no_plug_in():
    with pytest.raises(BadRequest, match="backend: must be auto, cpu, torch or mock here, got 'abacus'"):
        open_ranks(EngineConfig(model="m", backend="abacus"))


def test_every_parameter_is_one_that_an_engine_has_or_may_lack():
    named = {field.name for field in fields(SamplingParams)}
    assert named == capabilities.ALWAYS | (set(capabilities.FEATURES) - set(capabilities.BESIDE))


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A server over the example engine, which is installed as a distribution of its own."""
    folder = tmp_path_factory.mktemp("parrot")
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][backends.GROUP]
    ((name, value),) = points.items()
    site = install(folder / "site", name, value, (EXAMPLE / "parrot.py").read_text())
    model = make_byte_folder(folder / "model")
    command = [*CLI, "serve", str(model), "--backend", name, "--served-model-name", "m", "--port", "0"]
    with serving(command, PYTHONPATH=f"{site}:{ROOT / 'src'}") as server:
        yield server


def ask(server, **fields):
    body = {"model": "m", "prompt": "Hello, you!", **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_the_example_answers_through_the_server(parrot):
    answer = ask(parrot, max_tokens=500).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("Hello, you!", "stop")
    assert ask(parrot, max_tokens=1).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"logprobs": 1}, {"response_format": {"type": "json_object"}}])
def test_what_the_example_says_that_it_lacks_is_refused_by_name(parrot, fields):
    answer = ask(parrot, max_tokens=5, **fields)
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"]
        == f"{next(iter(fields))}: the engine of this model cannot do it: a parrot has none"
    )
