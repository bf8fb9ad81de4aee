"""Each option of `kvloom serve` is a row, and sets what its row says."""

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvloom.server.config.environment import environment_settings
from kvloom.server.run import cli, options
from kvloom.server.run.options import OPTIONS

PLAIN = [option for option in OPTIONS if option.key.setting not in cli._MADE]


def settings_of(monkeypatch, *arguments):
    """The settings with which `kvloom serve ARGUMENTS` would start."""
    launched = []
    monkeypatch.setattr(cli, "launch", launched.append)
    app = typer.Typer()
    app.command()(cli.serve)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return launched[0]


def value_of(option):
    """(what the option is given, what the setting is then)."""
    key = option.key
    if bool in key.types:
        return [option.key.flag], True
    if list in key.types:
        return [key.flag, "a.example", key.flag, "b.example"], ["a.example", "b.example"]
    if option.type is Path:
        return [key.flag, "/a/b"], Path("/a/b")
    value = key.choices[-1] if key.choices else "some" if option.type is str else option.type(key.low or 0) + 4
    if key.high is not None and not key.choices:
        value = min(value, option.type(key.high))
    return [key.flag, str(value)], value


@pytest.mark.parametrize("option", PLAIN, ids=lambda option: option.key.flag)
def test_an_option_sets_what_its_row_says(option, monkeypatch):
    arguments, value = value_of(option)
    settings = settings_of(monkeypatch, *arguments)
    place, other = (settings.models[0], settings.values) if option.is_model else (settings.values, settings.models[0])
    assert place[option.key.setting] == value
    assert option.key.setting not in other


def test_what_is_not_given_sets_nothing(monkeypatch):
    settings = settings_of(monkeypatch, "some-model")
    assert settings.values == environment_settings(os.environ) | {"models": [{"model": "some-model"}]}


def test_the_order_names_options_that_there_are():
    assert set(options._ORDER) <= {option.key.flag for option in OPTIONS}
