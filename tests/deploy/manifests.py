"""Reads deploy/kubernetes as kubectl and kustomize would, as far as these files need it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("base", "pool", "keys")
_NAMED = ("containers", "initContainers", "volumes", "volumeMounts", "env", "ports")


def documents(path: Path) -> list[Json]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def built(overlay: str) -> list[Json]:
    """The patched resources of the folder, as `kubectl kustomize` prints them."""
    folder = FOLDER / overlay
    [told] = documents(folder / "kustomization.yaml")
    found: list[Json] = []
    for name in told["resources"]:
        path = (folder / name).resolve()
        found += built(path.name) if path.is_dir() else documents(path)
    for patch in told.get("patches", ()):
        for change in documents(folder / patch["path"]) if "path" in patch else ():
            [target] = [each for each in found if _names(each) == _names(change)]
            _merge(target, change)
        if "patch" in patch:
            wanted = patch["target"]
            [target] = [each for each in found if _names(each) == (wanted["kind"], wanted["name"])]
            for change in yaml.safe_load(patch["patch"]):
                _add(target, change)
    return found


def one(found: list[Json], kind: str, name: str = "kvloom") -> Json:
    [each] = [each for each in found if _names(each) == (kind, name)]
    return each


def pod_of(manifest: Json) -> Json:
    pod: Json = manifest["spec"]["template"]["spec"]
    return pod


def ray_pods() -> list[Json]:
    [service] = documents(FOLDER / "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def pods() -> Iterator[tuple[str, Json]]:
    """Name and pod of every pod of every overlay, and of Ray's pods."""
    for overlay in OVERLAYS:
        for each in built(overlay):
            if each["kind"] in ("Deployment", "DaemonSet"):
                yield f"{overlay} {each['metadata']['name']}", pod_of(each)
    for index, pod in enumerate(ray_pods()):
        yield f"ray {index}", pod


def containers() -> Iterator[tuple[str, Json, Json]]:
    """Name, pod and container of every container."""
    for name, pod in pods():
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{name} {each['name']}", pod, each


def command_of(container: Json) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def flags_of(container: Json) -> dict[str, str]:
    """Name -> value of the --name=value options of a container's command."""
    return dict(each[2:].split("=", 1) for each in command_of(container) if each.startswith("--") and "=" in each)


def _names(manifest: Json) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _merge(target: Json, change: Json) -> None:
    """A strategic merge: lists of named things by their names, other lists replaced."""
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        elif name in _NAMED and isinstance(target.get(name), list):
            for each in value:
                known = [old for old in target[name] if _identity(name, old) == _identity(name, each)]
                if known:
                    _merge(known[0], each)
                else:
                    target[name].append(copy.deepcopy(each))
        else:
            target[name] = copy.deepcopy(value)


def _identity(kind: str, value: Json) -> Any:
    return value["mountPath"] if kind == "volumeMounts" else value["name"]


def _add(target: Json, change: Json) -> None:
    """An `add` of a JSON patch."""
    assert change["op"] == "add"
    *above, last = change["path"].strip("/").split("/")
    node: Any = target
    for step in above:
        node = node[int(step)] if isinstance(node, list) else node[step]
    if last == "-":
        node.append(change["value"])
    else:
        node[last] = change["value"]
