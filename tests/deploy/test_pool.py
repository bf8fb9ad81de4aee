"""The pool's systemd units run valid commands, and its dashboard queries only metrics that /metrics exports."""

import json
import re
import shlex
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from kvloom.pool.cli import app
from kvloom.pool.metrics import render
from tests.deploy.test_dashboard import expressions, names_of
from tests.support.pool.agents import config_of, new_kv, running_agent, session, slots_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def command_of(unit: str) -> list[str]:
    """The arguments after `kvloom pool COMMAND` in a unit."""
    (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[:3] == ["/usr/bin/env", "kvloom", "pool"]
    return words[3:]


def test_the_agents_unit_is_a_command_line_of_the_agent():
    name, *arguments = command_of("kvloom-pool.service")
    config = config_of(*arguments)
    assert (name, str(config.socket), config.http) == ("agent", "/dev/shm/ems/ems.sock", ("127.0.0.1", 9400))


def test_the_control_planes_unit_is_a_command_line_of_it():
    name, *arguments = command_of("kvloom-pool-control.service")
    command = get_command(app).get_command(None, name)
    assert command.make_context(name, arguments).params["listen"] == "127.0.0.1:8081"


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Sample name -> its label names, on an agent on which every counted event has happened once."""
    with running_agent() as agent, session(agent.config.socket, new_kv()) as cc:
        cc.save(slots_of(0), [1], [4])
        cc.load(slots_of(0, 1), [1, 2], [4, 4])
        agent.node.pool("default").counts.add("refused_quota")
        agent.node.pool("default").counts.add("denied_revoked")
        text = render([agent.stats()]).decode()
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_metric_of_the_dashboard_is_exported_with_its_labels(samples):
    dashboard = json.loads((DEPLOY / "grafana" / "kvloom-pool.json").read_text())
    found = list(expressions(dashboard["panels"]))
    assert len({name for expression in found for name in names_of(expression)}) >= 15
    for expression in found:
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        labels |= set(re.findall(r'(\w+)=~"', expression))
        for name in names_of(expression):
            assert name in samples
            assert labels <= samples[name], expression
    for variable in dashboard["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()
        assert label in samples[name]
