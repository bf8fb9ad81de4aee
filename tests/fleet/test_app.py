"""The Serve deployments that follow from a fleet's arguments. Without Ray."""

import json

import pytest

from kvloom.fleet.args import parse_args
from kvloom.fleet.plan import make_plan
from tests.support.configs import mock_document
from tests.support.lazily import Lazily

pytestmark = pytest.mark.usefixtures("ray_serve")
app, exceptions = Lazily("kvloom.fleet.app"), Lazily("ray.serve.exceptions")


def deployments(**args) -> dict:
    """Name -> deployment: the ingress and those that it is bound to."""
    ingress = app.application(make_plan(parse_args({"backend": "fake", **args})))._bound_deployment
    bound = [each._bound_deployment for each in ingress.init_args if hasattr(each, "_bound_deployment")]
    return {each.name: each for each in (ingress, *bound)}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"replicas": "two"}, "args.replicas: expected `int | null`, got `str`"),
        ({"router": {"policy": "random"}}, "args.router.policy: must be prefix or power-of-two, got 'random'"),
        ({"model": "/a", "mock": {}}, "args.mock: is for the model without weights: set backend to mock"),
    ],
)
def test_what_is_wrong_is_the_whole_message_that_serve_shows(given, problem):
    with pytest.raises(exceptions.RayServeException) as caught:
        app.build(given)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_the_arguments_may_be_strings_as_the_command_line_of_serve_gives_them():
    ingress = app.build({"backend": "fake", "replicas": "2", "kvPool": "true"})._bound_deployment
    assert ingress.init_args[0].args == parse_args({"backend": "fake", "replicas": 2, "kvPool": True})


def test_without_more_there_are_replicas_of_one_kind_and_a_server_before_them():
    found = deployments(replicas=3)
    assert {name: each.num_replicas for name, each in found.items()} == {"ingress": 1, "engines": 3}


def test_autoscaling_is_by_queued_tokens():
    scaling = {"minReplicas": 0, "maxReplicas": 5, "queuedTokensPerReplica": 99}
    config = deployments(autoscaling=scaling)["engines"]._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (0, 5, 99)
    assert config.policy.policy_function == "kvloom.fleet.scaling:on_queued_tokens"


def test_roles_are_deployments():
    found = deployments(roles={"prefill": 1, "decode": 2}, kvPool=True)
    assert {name: each.num_replicas for name, each in found.items()} == {"ingress": 1, "engines": 2, "prefill": 1}


def test_each_role_is_scaled_by_what_it_does():
    prefill = {"maxReplicas": 4, "queuedTokensPerReplica": 500, "upDelayS": 1}
    found = deployments(roles={"prefill": prefill, "decode": {"maxReplicas": 3, "requestsPerReplica": 8}}, kvPool=True)
    configs = {name: found[name]._deployment_config.autoscaling_config for name in ("prefill", "engines")}
    told = {
        name: (config.max_replicas, config.target_ongoing_requests, config.policy.policy_function.rpartition(":")[2])
        for name, config in configs.items()
    }
    assert told == {"prefill": (4, 500, "on_queued_tokens"), "engines": (3, 8, "on_requests")}
    assert configs["prefill"].upscale_delay_s == 1


def test_the_ranks_of_a_replica_are_placed_together(tmp_path):
    document = mock_document()
    document["ModelDeployParam"]["ModelParam"][0]["worldSize"] = 2
    document["ModelDeployParam"]["npuDeviceIds"] = [[0, 1]]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    config = deployments(config=str(path), cpusPerRank=2)["engines"]._replica_config
    assert config.placement_group_bundles == [{"CPU": 2}, {"CPU": 2}]
    assert config.placement_group_strategy == "STRICT_PACK"


@pytest.mark.parametrize(("policy", "is_of_two"), [("prefix", False), ("power-of-two", True)])
def test_the_router_decides_as_asked(policy, is_of_two):
    config = deployments(router={"policy": policy})["engines"]._deployment_config.request_router_config
    assert config.request_router_class == "kvloom.fleet.routing.router:KvRouter"
    assert config.request_router_kwargs["is_of_two"] is is_of_two


def test_several_ingresses_count_what_the_others_gave():
    config = deployments(ingresses=2)["engines"]._deployment_config.request_router_config
    assert config.request_router_kwargs["is_alone"] is False


def test_the_engines_alone_are_an_application_too_with_roles_and_without():
    def names(**args) -> list[str]:
        root = app.engines_alone(make_plan(parse_args({"backend": "fake", **args})))._bound_deployment
        beside = [each._bound_deployment.name for each in root.init_args if hasattr(each, "_bound_deployment")]
        return [root.name, *beside]

    assert names() == ["engines"]
    assert names(roles={"prefill": 1, "decode": 2}, kvPool=True) == ["engines", "prefill"]
