"""The commands, make targets and pages that the README names exist."""

import re
from pathlib import Path

import pytest

from tests.server.run.test_main import run_cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`kvloom ([a-z-]+)", README))))
def test_each_command_has_a_help_page_that_narrow_terminals_show_whole(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run_cli(command, "--help")
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    assert "…" not in result.stdout


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))))
def test_each_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_each_linked_page_exists(page):
    assert (ROOT / page).exists()
