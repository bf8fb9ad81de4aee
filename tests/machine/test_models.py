"""`kvloom models` and `kvloom pull PATH`: which models are listed, with which facts."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from kvloom.checkpoints import demo_models
from kvloom.checkpoints.fetching import HubModel
from kvloom.contract.errors import ModelError
from kvloom.machine.cli import models
from kvloom.server.run.adopt import adopt
from tests.support.homeless import lose_home
from tests.support.models.checkpoints import save, tiny_model
from tests.support.models.templates import HERMES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model of the user; the list of demo models holds one that is not fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    demo = HubModel((("demo==1.0", "demo.gguf"),), "demo.gguf", "0" * 64, 3 << 20, "Apache-2.0")
    monkeypatch.setattr("kvloom.machine.models.MODELS", {"demo": demo})
    monkeypatch.setattr(demo_models, "MODELS", {"demo": demo})
    folder = tmp_path / "mine"
    save(tiny_model("gemma3"), folder)
    Tokenizer(BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text("---\nlicense: gemma\n---\n# Mine\n", encoding="utf-8")
    return folder


def listed(capsys) -> list[dict[str, object]]:
    models(as_json=True)
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_of_ones_own_is_checked_listed_and_described(folder, capsys):
    assert adopt(str(folder)) == "mine"
    demo, mine = listed(capsys)
    assert (demo["name"], demo["path"], demo["file_bytes"], demo["licence"]) == ("demo", "", 3 << 20, "Apache-2.0")
    assert (mine["name"], mine["path"], mine["licence"], mine["problem"]) == ("mine", str(folder), "gemma", "")
    assert (mine["family"], mine["format"]) == ("gemma3", "safetensors F32")
    assert mine["file_bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert mine["token_bytes"] == 2 * 3 * 2 * 32 * 2  # keys and values, layers, KV heads, head size, bf16
    assert 0 < mine["weight_bytes"] < mine["file_bytes"]


def test_the_table_says_how_to_fetch_what_is_not_here(folder, capsys):
    adopt(str(folder))
    models()
    head, demo, mine = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "NAME"
    assert demo.split()[0] == "demo"
    assert demo.endswith("not fetched: kvloom pull demo")
    assert mine.split()[:4] == ["mine", "gemma3", "safetensors", "F32"]


@pytest.mark.parametrize(
    ("template", "writes"),
    [
        ("", ""),
        (HERMES, "calls: hermes, from the template; reasoning: none"),
        (
            "{{ messages[0].content }}{# <think> </think> #}",
            "calls: hermes, described in the system message; reasoning: <think>...</think>",
        ),
    ],
)
def test_the_list_says_how_a_model_writes_calls_and_reasoning(folder, capsys, template: str, writes: str):
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    adopt(str(folder))
    assert listed(capsys)[1]["writes"] == writes
    models()
    assert writes in capsys.readouterr().out


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    lose_home(monkeypatch)
    with pytest.raises(ModelError, match=r"^~/\.cache: this user has no home folder: set HOME or XDG_CACHE_HOME$"):
        models()


@pytest.mark.parametrize("find", [adopt, demo_models.find_model])
def test_the_home_of_a_user_who_is_none_holds_no_model(find, folder):
    with pytest.raises(ModelError, match="'~nobody-of-that-name/model'"):
        find("~nobody-of-that-name/model")


def test_what_can_no_longer_be_served_is_listed_with_its_reason(folder, capsys):
    adopt(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}), encoding="utf-8")
    _, mine = listed(capsys)
    assert "architecture 'Mamba' is not known" in str(mine["problem"])


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_what_is_no_whole_model_is_refused(folder, missing, capsys):
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        adopt(str(folder))
    assert [row["name"] for row in listed(capsys)] == ["demo"]
