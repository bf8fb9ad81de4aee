"""deploy/kubernetes matches the published schemas and names only options that the server and the pool have."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from kvloom.cli import app
from kvloom.fleet.args import parse_args
from kvloom.pool.config import parse_size
from kvloom.server.run.guards import OPEN_PATHS
from kvloom.server.run.launch import read_settings
from tests.deploy.manifests import (
    FOLDER,
    OVERLAYS,
    Json,
    built,
    command_of,
    containers,
    documents,
    flags_of,
    one,
    pod_of,
    pods,
    ray_pods,
)  # fmt: skip
from tests.support.pool.agents import running_agent
from tests.support.servers import FakeServer

ROOT = FOLDER.parents[1]
VERSIONS = ("1.30", kubernetes_validate.latest_version())
OF_OPERATORS = {"ServiceMonitor", "PodMonitor", "RayService"}  # their operators define the schemas
ALL = list(containers())
EACH = pytest.mark.parametrize(("name", "pod", "container"), ALL, ids=[name for name, _, _ in ALL])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_as_the_schemas_have_them(overlay: str, version: str):
    found = [each for each in built(overlay) if each["kind"] not in OF_OPERATORS]
    assert {each["kind"] for each in found} >= {
        "Deployment",
        "Service",
        "HorizontalPodAutoscaler",
        "PodDisruptionBudget",
    }
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)
    for pod in ray_pods():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": pod}
        kubernetes_validate.validate(whole, version, strict=True)


def parsed(command: list[str]) -> tuple[str, Any]:
    """The name and the context of a command line. Raises a UsageError for a wrong one."""
    group: Any = get_command(app)
    context, rest, path = group.context_class(group), command[1:], []
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, rest)
        path.append(name)
        context = group.context_class(group, parent=context)
    return " ".join(path), group.make_context(path[-1], rest, parent=context.parent)


@EACH
def test_every_command_is_one_that_kvloom_has(name: str, pod: Json, container: Json):
    command = command_of(container)
    if not command:  # KubeRay adds Ray's own command
        assert name.startswith("ray")
    elif command[0] == "install":
        assert name.endswith("folder")
    else:
        assert command[0] == "kvloom"
        assert parsed(command)[0] in ("serve", "pull", "pool agent")


def test_a_flag_that_is_not_there_would_be_seen():
    with pytest.raises(Exception, match="No such option"):
        parsed(["kvloom", "serve", "smollm2", "--gracious=30"])


@EACH
def test_nobody_is_root_or_writes_where_no_volume_is(name: str, pod: Json, container: Json):
    own = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (own["allowPrivilegeEscalation"], own["capabilities"]["drop"]) == (False, ["ALL"])
    if name.endswith("folder"):
        assert (own["runAsUser"], own["capabilities"]["add"]) == (0, ["CHOWN", "FOWNER"])
    else:
        assert "runAsUser" not in own
        assert "add" not in own["capabilities"]
    if not name.startswith("ray"):
        assert own["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert set(mounts.values()) <= {each["name"] for each in pod["volumes"]}
    for variable in container.get("env", ()):
        assert (variable["name"], variable["value"] in mounts) in [
            ("XDG_CACHE_HOME", True),
            ("RAY_USAGE_STATS_ENABLED", False),
        ]


def test_environment_variables_are_read_by_somebody():
    names = {variable["name"] for _, _, each in containers() for variable in each.get("env", ())}
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert names == {name for name in names if f'"{name}"' in source}


def test_probes_and_services_find_their_ports():
    for overlay in OVERLAYS:
        found = built(overlay)
        for each in (each for each in found if each["kind"] in ("Deployment", "DaemonSet")):
            [container] = pod_of(each)["containers"]
            [port] = container["ports"]
            flags = flags_of(container)
            assert port["containerPort"] == int(flags.get("port") or flags["http"].rpartition(":")[2])
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container.get(kind, {"httpGet": {"port": port["name"]}})["httpGet"]["port"] == port["name"]
        service, labels = one(found, "Service"), pod_of_labels(one(found, "Deployment"))
        assert service["spec"]["selector"].items() <= labels.items()
        assert {each["targetPort"] for each in service["spec"]["ports"]} == {"http"}
        monitor = one(found, "ServiceMonitor")["spec"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {each["port"] for each in monitor["endpoints"]} <= {each["name"] for each in service["spec"]["ports"]}
        assert one(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert one(found, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "kvloom"
        assert f"--allowed-host={service['metadata']['name']}" in command_of(
            pod_of(one(found, "Deployment"))["containers"][0]
        )
    agents = built("pool")
    monitor = one(agents, "PodMonitor", "kvloom-pool")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod_of_labels(one(agents, "DaemonSet", "kvloom-pool")).items()


def pod_of_labels(manifest: Json) -> Json:
    labels: Json = manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
    return labels


def test_the_routes_that_are_asked_for_answer(server: FakeServer):
    found = built("base")
    [container] = pod_of(one(found, "Deployment"))["containers"]
    probes = {container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes <= set(OPEN_PATHS)  # paths that need no API key
    for path in (*probes, *(each["path"] for each in one(found, "ServiceMonitor")["spec"]["endpoints"])):
        assert server.client.get(path).status_code == 200
    [metric] = one(found, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert f"\n{metric['pods']['metric']['name']}{{" in server.client.get("/metrics").text


def test_the_agents_routes_answer():
    agents = built("pool")
    [container] = pod_of(one(agents, "DaemonSet", "kvloom-pool"))["containers"]
    paths = {container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe")}
    paths |= {each["path"] for each in one(agents, "PodMonitor", "kvloom-pool")["spec"]["podMetricsEndpoints"]}
    with running_agent(http=("127.0.0.1", 0)) as agent:
        for path in paths:
            assert httpx.get(f"http://127.0.0.1:{agent.http_port}{path}").status_code == 200


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_is_told_to_stop_has_the_time_that_its_requests_get(overlay: str):
    pod = pod_of(one(built(overlay), "Deployment"))
    [container] = pod["containers"]
    [_, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + float(flags_of(container)["grace"]) + 5


def test_replicas_and_agent_meet_at_one_socket(tmp_path: Path):
    found = built("pool")
    replica, agent = pod_of(one(found, "Deployment")), pod_of(one(found, "DaemonSet", "kvloom-pool"))
    flags, config = flags_of(agent["containers"][0]), json.loads((FOLDER / "pool" / "config.json").read_text())
    socket = Path(flags["socket"])
    assert config["ModelDeployParam"]["kvPoolConfig"]["socketPath"] == str(socket)
    folders = []
    for pod in (replica, agent):
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == str(socket.parent)]
        [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        folders.append(volume["hostPath"])
    assert folders[0] == folders[1]
    assert int(flags["socket-group"]) == replica["securityContext"]["runAsGroup"] == agent["securityContext"]["fsGroup"]
    assert agent["initContainers"][0]["args"][-1] == str(socket.parent)
    memory = parse_size(agent["containers"][0]["resources"]["limits"]["memory"].removesuffix("i"))
    assert memory >= 1.25 * parse_size(flags["pool"])
    file = tmp_path / "conf" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    file.chmod(0o640)
    settings = read_settings(file, {}).build()
    assert settings.models[0].engine.kv_tier is not None
    mounts = {each["mountPath"] for each in replica["containers"][0]["volumeMounts"]}
    given = Path(flags_of(replica["containers"][0])["config"])
    assert {str(given), str(given.parents[1])} <= mounts  # logs lie below the parent of conf
    assert config["OtherParam"]["LogParam"]["logPath"].startswith("/logs/")


def test_monitors_have_the_fields_of_the_prometheus_operator():
    for overlay in OVERLAYS:
        for each in (each for each in built(overlay) if each["kind"] in ("ServiceMonitor", "PodMonitor")):
            assert each["apiVersion"] == "monitoring.coreos.com/v1"
            key = "endpoints" if each["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
            assert each["spec"].keys() == {"selector", key}
            for endpoint in each["spec"][key]:
                assert endpoint.keys() - {"authorization"} == {"port", "path", "interval"}
    authorization = one(built("keys"), "ServiceMonitor")["spec"]["endpoints"][0]["authorization"]
    assert authorization["credentials"].keys() == {"name", "key"}


def test_keys_come_from_a_secret():
    pod = pod_of(one(built("keys"), "Deployment"))
    [container] = pod["containers"]
    hashes = Path(flags_of(container)["api-key-file"])
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == str(hashes.parent)]
    [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["secret"] == {"secretName": "kvloom-api-keys", "defaultMode": 0o440}
    assert "--from-file=hashes" in (FOLDER / "keys" / "kustomization.yaml").read_text()


def test_the_rayservice_has_kuberays_fields_and_the_fleets():
    [service] = documents(FOLDER / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["spec"].keys() == {"serveConfigV2", "rayClusterConfig"}
    serve: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    module, _, function = application["import_path"].partition(":")
    assert f"\ndef {function}(" in (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
    args = parse_args(application["args"])
    cluster = service["spec"]["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    assert workers.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    [head], [worker] = (pod["containers"] for pod in ray_pods())
    assert head["image"] == worker["image"]  # a fleet refuses replicas of other versions
    assert {each["name"]: each["containerPort"] for each in head["ports"]}["serve"] == serve["http_options"]["port"]
    assert int(worker["resources"]["limits"]["cpu"]) >= args.cpus_per_rank
    assert args.autoscaling is not None
    assert args.autoscaling.max_replicas <= workers["maxReplicas"]
    assert all(pod["terminationGracePeriodSeconds"] > args.grace_s for pod in ray_pods())


def test_pods_ask_for_no_token_and_are_known_by_their_labels():
    for name, pod in pods():
        assert pod["enableServiceLinks"] is False
        if not name.startswith("ray"):  # Ray's autoscaler asks Kubernetes for pods
            assert pod["automountServiceAccountToken"] is False


CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")


def test_the_containerfile_does_what_the_documents_say(server: FakeServer):
    steps = re.findall(r"^([A-Z]+) (.*)$", CONTAINERFILE, re.MULTILINE)
    [command] = [json.loads(text) for step, text in steps if step == "CMD"]
    path, context = parsed(command)
    assert (path, context.params["allow_all_addresses"]) == ("serve", True)
    [user] = [text for step, text in steps if step == "USER"]
    assert int(user) == pod_of(one(built("base"), "Deployment"))["securityContext"]["runAsUser"]
    assert ("EXPOSE", "1025") in steps
    assert ("ENV", "XDG_CACHE_HOME=/cache") in steps
    assert "-m build --wheel" in (ROOT / "Makefile").read_text()
    assert any("pip install --no-cache-dir build && python -m build --wheel" in text for step, text in steps)
    [route] = re.findall(r"urlopen\('http://127.0.0.1:1025(/[^']*)'", CONTAINERFILE)
    assert server.client.get(route).status_code == 200
    for extra in re.findall(r"EXTRAS=\[(\w+)\]", CONTAINERFILE):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
