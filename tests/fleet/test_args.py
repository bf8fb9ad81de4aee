"""An error in a fleet.yaml names the path of the mistake; a fleet that cannot start says why in one line."""

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.fleet import plan as plans
from kvloom.fleet.args import Autoscaling, FleetArgs, HttpOptions, parse_args, read_fleet_file
from kvloom.fleet.plan import Plan, layout_of, make_plan, refusal
from kvloom.rank.kernels.build import ISAS
from tests.support.configs import mock_document

FLEET = "applications: [{import_path: 'kvloom.fleet.app:build', args: {backend: mock}}]"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"replicas": 0}, "args.replicas: expected `int` >= 1"),
        ({"replicas": "two"}, "args.replicas: expected `int | null`, got `str`"),
        ({"replica": 2}, "args: object contains unknown field `replica`"),
        ({"autoscaling": {"minReplicas": 1}}, "args.autoscaling: object missing required field `maxReplicas`"),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "args.autoscaling.minReplicas: must be at most"),
        ({"router": {"policy": "random"}}, "args.router.policy: must be prefix or power-of-two, got 'random'"),
        ({"router": {"guardFactor": 0.5}}, "args.router.guardFactor: expected `float` >= 1"),
        ({"replicas": 10**400}, "args.replicas: expected `int` <= 10000"),
        ({"cpusPerRank": math.inf}, "args.cpusPerRank: expected `float` <= 1000000000"),
        ({"gpusPerRank": math.inf}, "args.gpusPerRank: expected `float` <= 1000000000"),
        ({"patienceS": math.nan}, "args.patienceS: expected `float` >= 0"),
        ({"kvPoolGb": math.inf}, "args.kvPoolGb: expected `float` <= 1000000000"),
        ({"mock": {"stepMs": math.inf}}, "args.mock.stepMs: expected `float` <= 1000000000"),
        ({"roles": {"prefill": 1, "decode": 1}}, "args.kvPool: must be true with roles"),
        ({"roles": {"prefill": 0, "decode": 1}}, "args.roles.prefill: expected `int` >= 1"),
        ({"roles": {"prefill": {}, "decode": 1}}, "args.roles.prefill: object missing required field `maxReplicas`"),
        (
            {"roles": {"prefill": 1, "decode": {"maxReplicas": 1, "minReplicas": 2}}, "kvPool": True},
            "args.roles.decode.minReplicas: must be at most maxReplicas, 1, got 2",
        ),
        (
            {"roles": {"prefill": 1, "decode": {"maxReplicas": 1, "queuedTokensPerReplica": 9}}},
            "args.roles.decode: object contains unknown field `queuedTokensPerReplica`",
        ),
        (
            {"roles": {"prefill": 1, "decode": 1}, "kvPool": True, "autoscaling": {"maxReplicas": 2}},
            "args.autoscaling: is had by each role where there are roles",
        ),
        ({"replicas": 2, "autoscaling": {"maxReplicas": 2}}, "args.replicas: is not had together with autoscaling"),
        ({"replicas": 2, "roles": {"prefill": 1, "decode": 1}}, "args.replicas: is not had together with roles"),
    ],
)
def test_a_wrong_value_is_told_with_its_path(given, problem):
    with pytest.raises(BadRequest) as caught:
        make_plan(parse_args(given))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({}, 1, 1),
        ({"replicas": 3}, 3, 3),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}, 0, 4),
        ({"roles": {"prefill": 1, "decode": 2}}, 2, 3),
        ({"roles": {"prefill": {"maxReplicas": 3}, "decode": {"minReplicas": 2, "maxReplicas": 5}}}, 2, 8),
    ],
)
def test_so_many_replicas_answer_at_least_and_so_many_there_are_at_most(given, least, most):
    args = parse_args(given)
    assert (args.least_replicas, args.most_replicas, args.may_be_empty) == (least, most, least == 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("applications: []", "applications: must be a list of one application"),
        ("applications: [{import_path: other:app}]", "applications[0].import_path: must be kvloom.fleet.app:build"),
        ("applications: [{import_path: 'kvloom.fleet.app:build'}]", "applications[0].args: must be an object"),
        ("applications: [{}, {}]", "applications[1]: is one too many: a fleet is one application"),
        (
            "applications: [{import_path: 'kvloom.fleet.app:build', args: {replicas: -1}}]",
            "applications[0].args.replicas: expected `int` >= 1",
        ),
        (f"{FLEET}\nhttp_options: [1]", "http_options: must be an object"),
        (f"{FLEET}\nhttp_options: {{port: many}}", "http_options.port: expected `int | null`, got `str`"),
        (f"{FLEET}\nhttp_options: {{port: true}}", "http_options.port: expected `int | null`, got `bool`"),
        (f"{FLEET}\nhttp_options: {{port: 65536}}", "http_options.port: expected `int` <= 65535"),
        (f"{FLEET}\nhttp_options: {{host: 5}}", "http_options.host: expected `str | null`, got `int`"),
        ("[" * 100_000, "is not valid YAML: it is nested deeper than 64"),
        ("a: 2026-99-99", "is not valid YAML: month must be in 1..12"),
        ("a: !!timestamp x", "is not valid YAML: "),
        ("a: !!bool x", "is not valid YAML: "),
        ("{", "is not valid YAML: while parsing a flow node did not find expected node content in"),
    ],
)
def test_a_wrong_file_is_told_with_the_path_of_its_mistake(tmp_path, text, problem):
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest) as caught:
        read_fleet_file(file)
    assert str(caught.value).startswith(f"{file}: {problem}")


def test_a_right_file_is_read():
    args, options = read_fleet_file(Path("tests/fleet/fleet.yaml"))
    assert (args.backend, args.replicas, args.mock.step_ms, options) == ("fake", 2, 20, HttpOptions())


def test_a_missing_file_is_told():
    with pytest.raises(BadRequest, match=r"nowhere\.yaml: cannot be read: No such file"):
        read_fleet_file(Path("nowhere.yaml"))


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (FleetArgs(model="/a", mock={}), "args.mock: is for the model without weights"),
        (FleetArgs(backend="fake", max_batch=5001), "^args.maxBatch: must be between 1 and 5000, got 5001$"),
        (FleetArgs(backend="mocck"), "^args.backend: must name a back end that is installed .default, auto, cpu"),
        (FleetArgs(backend="fake", name="a b"), "^args.name: must be 1 to 256 letters, digits, "),
        (
            FleetArgs(backend="fake", weight_format="w2a2"),
            '^args.weightFormat: must be one of "auto", "stored", "w8a8", ',
        ),
    ],
)
def test_what_a_fleet_cannot_do_is_refused_before_ray_is_started(args, problem):
    with pytest.raises(BadRequest, match=problem):
        make_plan(args)


@pytest.mark.parametrize(
    ("given", "backend"), [("mock", "fake"), ("Torch", "reference"), ("default", "auto"), ("atb", "auto")]
)
def test_backends_have_the_names_that_kvloom_serve_takes(given, backend):
    assert make_plan(FleetArgs(model="/a", backend=given)).values["models"][0]["backend"] == backend


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        (["a b=/x"], "a b=/x: must be 1 to 128 letters, digits or any of "),
        (["a/ready=/x"], "a/ready=/x: 'a/ready' cannot be told from a route of /v2/models"),
        (["mock=/x"], "mock=/x: 'mock' is the name of a model$"),
        (["a=/x", "b=/y", "a=/z"], "a=/z: 'a' is the name of another adapter$"),
    ],
)
def test_names_of_adapters_are_checked_before_ray_is_started(modules, problem, tmp_path):
    document = mock_document()
    document["ModelDeployParam"]["ModelParam"][0] |= {"modelName": "mock", "loraModules": modules}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    path.chmod(0o640)
    with pytest.raises(BadRequest, match=f"^loraModules: {problem}"):
        make_plan(FleetArgs(config=str(path)))


def test_a_node_with_another_version_is_refused_by_name():
    plan = make_plan(FleetArgs(backend="fake"))
    with pytest.raises(ModelError, match=r"node n1 has kvloom .*, and the fleet was deployed with 0\.0"):
        Plan(plan.values, plan.args, "0.0").config("n1")


def test_a_model_that_is_missing_on_one_node_is_told_with_the_node():
    plan = make_plan(FleetArgs(model="/nowhere/model.gguf"))
    with pytest.raises(ModelError, match=r"node n1: .*nowhere"):
        plan.config("n1")


def test_the_server_does_not_need_ray():
    program = "import sys; sys.modules['ray'] = None; import kvloom.server.run.compose, kvloom.fleet.cli"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def run_without_ray(*options: str) -> str:
    """The message of `kvloom fleet run` where Ray cannot be imported."""
    program = "import sys; sys.modules['ray'] = None; from kvloom.cli import main; main()"
    command = [sys.executable, "-c", program, "fleet", "run", "--backend", "fake", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr.strip()


def test_without_ray_the_command_says_how_to_get_it():
    assert run_without_ray("--port", "0") == "kvloom: a fleet needs Ray (ray is missing): pip install 'kvloom[ray]'"


def test_a_port_in_use_is_told_before_ray_is_imported():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = run_without_ray("--port", str(port))
    assert said == (
        f"kvloom: port {port} of 127.0.0.1 is in use by another program; stop that one or choose another port"
    )


def test_weights_of_another_form_are_refused_by_name():
    first = ("n1", "cpu w8a8")
    assert refusal(first, "n2", "cpu w8a8") == ""
    assert refusal(first, "n3", "cpu bf16") == (
        "node n3 holds the model as cpu bf16, and node n1 of the same fleet as cpu w8a8; "
        "give both the same files, or set weightFormat"
    )


def test_a_processor_with_a_tile_unit_goes_on_with_the_tokens_of_one_without(monkeypatch):
    layouts = {}
    for isa, (_flags, needed) in ISAS.items():
        monkeypatch.setattr(plans, "cpu_flags", lambda needed=needed: needed)
        layouts[isa] = layout_of("cpu in 8 bits")
    assert layouts["amx"] == layouts["avx512"]
    assert len(set(layouts.values())) == len(ISAS) - 1
    assert layout_of("torch in bfloat16") != layout_of("torch in float16")


def test_plans_of_other_settings_are_other_fleets():
    one, two = (make_plan(FleetArgs(backend="fake", max_batch=number)) for number in (4, 8))
    assert one.id != two.id
    assert one.id == make_plan(FleetArgs(backend="fake", max_batch=4)).id


def test_a_fleet_that_is_a_server_itself_has_tls_of_its_own_and_is_one(tmp_path):
    config = tmp_path / "config.json"
    document = mock_document()
    document["OtherParam"]["ServeParam"] |= {"managementPort": 1026}
    config.write_text(json.dumps(document))
    config.chmod(0o640)
    with pytest.raises(BadRequest, match="must not set managementPort"):
        make_plan(FleetArgs(config=str(config)))
    assert make_plan(FleetArgs(config=str(config)), is_behind_proxy=False).config("n").management
    with pytest.raises(BadRequest, match=r"args\.ingresses: must be 1 here"):
        make_plan(FleetArgs(backend="fake", ingresses=2), is_behind_proxy=False)


def test_replicas_of_one_machine_share_its_memory(tmp_path):
    """Each measures what is free before the others' caches have been written to."""
    args = FleetArgs(backend="fake", autoscaling=Autoscaling(max_replicas=3))
    assert make_plan(args, is_behind_proxy=False).config("n").models[0].engine.num_sharing == 3
    assert make_plan(args).config("n").models[0].engine.num_sharing == 1, "nodes of a cluster are not known yet"
