"""Reads a config.json, checks it against its layout, and reports all its mistakes at once."""

import difflib
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.contract.errors import BadRequest, UserError
from kvloom.reading import read_text
from kvloom.server.config.key import Key, shown
from kvloom.server.config.keys import LAYOUT_1, LAYOUT_2

MAX_FILE_BYTES = 10 * 2**20
MAX_MISTAKES = 50  # mistakes reported at once
# a JSON string, which is kept, or a comment up to the end of the line, which is removed
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*')
_BELOW = (
    ("max_iter_times", "max_seq_len", 1),
    ("max_prefill_batch", "max_batch", 0),
    ("max_preempt", "max_batch", 0),
)


class Mistakes(BadRequest):
    """Several mistakes of one file, one line each, worded as if each were the only one."""

    def __init__(self, path: Path, mistakes: Sequence[UserError]) -> None:
        told = [str(mistake) for mistake in mistakes[:MAX_MISTAKES]]
        if len(mistakes) > MAX_MISTAKES:
            told.append(f"and {len(mistakes) - MAX_MISTAKES} more")
        super().__init__("", "\n".join([f"{path} has {len(mistakes)} mistakes:", *told]))
        self.mistakes = tuple(mistakes)


@dataclass(slots=True)
class Found:
    """Contents of a document. `paths`: JSON path of each setting; `idle`: paths of keys without effect."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences to log once the log is open
    mistakes: list[BadRequest] = field(default_factory=list)

    def wrong(self, path: str, problem: str) -> None:
        self.mistakes.append(BadRequest(path, problem))

    def path_of(self, name: str, index: int = 0) -> str:
        """JSON path of a setting, for model number `index`; the setting's name if no file contains it."""
        return self.paths.get(f"{name}[{index}]", self.paths.get(name, name))

    def check_together(self) -> None:
        """Check ranges that depend on another key (spec tables 2-1, 2-5 and 2-6)."""
        values = self.values
        for name, other, offset in _BELOW:
            if name in values and other in values and values[name] > values[other] - offset:
                if name == "max_iter_times" and "max_input_tokens" in values:
                    continue  # a layout with a separate limit for prompts lets answers fill the rest
                self.wrong(
                    self.paths[name],
                    f"must be at most {values[other] - offset} ({self.paths[other]}"
                    f"{f' - {offset}' if offset else ''}), got {values[name]}",
                )
        if {"prealloc_blocks", "max_iter_times", "block_size"} <= values.keys():
            limit = -(-values["max_iter_times"] // values["block_size"])
            if values["prealloc_blocks"] > limit:
                problem = f"must be at most {limit} (maxIterTimes / cacheBlockSize), got {values['prealloc_blocks']}"
                self.wrong(self.paths["prealloc_blocks"], problem)
        self._check_models()
        self._check_swapping()

    def _check_swapping(self) -> None:
        """supportSwapPolicy needs a model with memory for it: cpuMemSize."""
        models = self.values.get("models", ())
        if not self.values.get("is_swapping") or any("cpu_mem_gb" in model for model in models):
            return
        path = f"{self.path_of('name').rpartition('.')[0]}.cpuMemSize"
        self.wrong(path, f"is missing: it must be above 0 GB when {self.paths['is_swapping']} is true")

    def alone(self) -> Iterator[str]:
        """A sentence for each key that only modifies another key, which is absent."""
        values = self.values
        if "management_host" in values and not {"management_port", "metrics_port"} & values.keys():
            yield f"{self.paths['management_host']}: without effect without managementPort or metricsPort"
        if values.get("https") and values.get("tls_crl_path") and not values.get("tls_crl_files"):
            why = "tlsCrlFiles names no list of revoked certificates in it"
            yield f"{self.paths['tls_crl_path']}: without effect: {why}"

    def _check_models(self) -> None:
        models = self.values.get("models", ())
        devices = self.values.get("device_ids")
        if devices is not None and len(devices) not in (1, len(models)):
            self.wrong(
                self.paths["device_ids"],
                f"must have one list for each of the {len(models)} models, or one for all, got {len(devices)}",
            )
            devices = None
        for index, model in enumerate(models):
            if model.get("model") == "" and model.get("instance_type") != "StandardMock":
                self.wrong(self.path_of("model", index), "must name a folder, a .gguf file or a fetched model")
            if model.get("npu_mem_gb", -1) != -1 and model["npu_mem_gb"] <= 0:
                problem = f"must be above 0 GB, or -1 for a share of what is free, got {model['npu_mem_gb']:g}"
                self.wrong(self.path_of("npu_mem_gb", index), problem)
            if -1 < model.get("cpu_mem_gb", 0) < 0:
                problem = f"must be 0 GB or more, or -1 for what is free, got {model['cpu_mem_gb']:g}"
                self.wrong(self.path_of("cpu_mem_gb", index), problem)
            if self.values.get("is_swapping") and model.get("cpu_mem_gb") == 0:
                path = self.path_of("cpu_mem_gb", index)
                self.wrong(path, f"must be above 0 GB when {self.paths['is_swapping']} is true, got 0")
            if model.get("tp", -1) not in (-1, model.get("world_size", 1)):
                problem = f"must be worldSize, {model.get('world_size', 1)}, or -1 for that, got {model['tp']}"
                self.wrong(self.path_of("tp", index), problem)
            if devices is None or "world_size" not in model:
                continue
            given = devices[index if len(devices) > 1 else 0]
            if len(given) != model["world_size"]:
                problem = f"must be as many as the devices of {self.paths['device_ids']}, {shown(given)}"
                self.wrong(self.path_of("world_size", index), f"{problem}, got {model['world_size']}")


def read_document(path: Path) -> Found:
    """The file's settings. Raises BadRequest for one mistake, Mistakes for several, with JSON path, value and range."""
    found = Found()
    document = _read(path, found.notes)
    layout = LAYOUT_2 if LAYOUT_2.keys() & document.keys() else LAYOUT_1
    _walk(layout, document, "", found, found.values)
    if not found.mistakes:
        found.check_together()
    if len(found.mistakes) > 1:
        raise Mistakes(path, found.mistakes)
    if found.mistakes:
        raise found.mistakes[0]
    found.notes += [f"{path}: {note}" for note in found.alone()]
    if found.idle:
        found.notes.append(f"{path}: without effect here: {', '.join(sorted(found.idle))}")
    return found


def _read(path: Path, notes: list[str]) -> dict[str, Any]:
    """The JSON object in the file; `//` comments are allowed. Raises BadRequest."""
    try:
        status = path.stat()
        if status.st_mode & 0o022 and not _is_device_or_folder(status.st_mode):
            raise BadRequest(str(path), "can be written by others; run: chmod 640 " + str(path))
        if status.st_mode & 0o004:
            notes.append(f"{path} can be read by everybody; run: chmod 640 {path}")
        text = _COMMENT.sub(lambda found: found[1] or "", read_text(path, MAX_FILE_BYTES))
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(str(path), f"is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest(str(path), "must hold a JSON object")
    return document


def _is_device_or_folder(mode: int) -> bool:
    """Whether a file of this mode cannot be read as a document anyway; nobody should change its rights for that."""
    return stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"{json.dumps(name)} stands twice in one object")
        document[name] = value
    return document


def _refused(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _walk(layout: Any, value: Any, path: str, found: Found, into: dict[str, Any]) -> None:
    """Check `value` and everything in it against the layout; settings go `into`, each model's into its own dict."""
    if isinstance(layout, Key):
        try:
            layout.check(path, value)
        except BadRequest as error:
            found.mistakes.append(error)
            return
        _keep(layout, value, path, found, into)
    elif isinstance(layout, list):
        if not isinstance(value, list) or not value:
            found.wrong(path, "must be a list of models, at least one")
            return
        found.values["models"] = [{} for _ in value]
        for i, (item, model) in enumerate(zip(value, found.values["models"], strict=True)):
            _walk(layout[0], item, f"{path}[{i}]", found, model)
    elif isinstance(value, dict):
        _walk_object(layout, value, path, found, into)
    else:
        found.wrong(path, f"must be an object, got {shown(value)}")


def _keep(key: Key, value: Any, path: str, found: Found, into: dict[str, Any]) -> None:
    if key.is_idle and value != key.default:
        found.idle.append(path)
    if not key.setting:
        return
    into[key.setting] = value if key.read is None else key.read(value)
    found.paths[key.setting] = path
    index = re.search(r"\[(\d+)]", path)
    if index is not None:
        found.paths[f"{key.setting}[{index[1]}]"] = path


def _walk_object(
    layout: Mapping[str, Any], value: Mapping[str, Any], path: str, found: Found, into: dict[str, Any]
) -> None:
    meant = set()
    for name in value:
        if name not in layout:
            guess = _guess(name, layout, value)
            meant.add(guess)
            found.wrong(_join(path, name), _unknown(name, guess, layout))
    for name in _missing(layout, value):
        if name not in meant:
            found.wrong(_join(path, name), "is missing")
    for name, item in value.items():
        if name in layout:
            _walk(layout[name], item, _join(path, name), found, into)


def _guess(name: str, layout: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The key that was probably meant, absent ones preferred to given ones; "" for none."""
    for others in (layout.keys() - given.keys(), layout.keys()):
        lower = {other.lower(): other for other in others}
        if close := difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.75):
            return lower[close[0]]
    return ""


def _unknown(name: str, guess: str, layout: Mapping[str, Any]) -> str:
    if guess:
        return f"is not known; did you mean {guess}?"
    elsewhere = [path for path in (*_paths(LAYOUT_1, name), *_paths(LAYOUT_2, name)) if path]
    if elsewhere:
        return f"is not known here; its path is {' or '.join(dict.fromkeys(elsewhere))}"
    return f"is not known; known are {', '.join(layout)}"


def _paths(layout: Any, name: str, path: str = "") -> Iterator[str]:
    """JSON paths of a key of that name anywhere in a layout."""
    below = layout[0] if isinstance(layout, list) else layout
    if isinstance(below, Key):
        return
    for each, further in below.items():
        here = _join(path, each) + ("[]" if isinstance(further, list) else "")
        if each == name:
            yield here
        yield from _paths(further, name, here)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _missing(layout: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[str]:
    """Required keys that are absent; a mock needs no weights."""
    is_mock = value.get("modelInstanceType") == "StandardMock"
    for name, below in layout.items():
        if name not in value and _is_required(below) and not (is_mock and name == "modelWeightPath"):
            yield name


def _is_required(layout: Any) -> bool:
    if isinstance(layout, Key):
        return layout.is_required
    below = layout[0].values() if isinstance(layout, list) else layout.values()
    return any(map(_is_required, below))
