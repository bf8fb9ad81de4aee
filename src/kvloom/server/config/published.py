"""Keys of later releases' published config.json files that belong to other processes or other hardware.

Their types are checked, and the log names those that a file contains. Values that ask for unsupported features (several
machines, split prefill and decode, remote code) are refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.config.key import Key, shown

_ELSEWHERE = "of a process that is not here"
_OTHER_TLS = "management and metrics show the server's own certificate"


_PLUGINS = ("prefix_cache", "splitfuse")  # features that are always on, by their names in plugin_params


def check_plugins(value: Any) -> None:
    """Checks an object, or its JSON text, that names plugins in plugin_type, separated by commas. Raises BadRequest."""
    try:
        given = json.loads(value) if isinstance(value, str) and value else value or {}
        names = [name.strip() for name in given.get("plugin_type", "").split(",") if name.strip()]
    except (ValueError, AttributeError, RecursionError):
        raise BadRequest("", f'must be an object with "plugin_type", or its text, got {shown(value)}') from None
    for name in names:
        if name not in _PLUGINS:
            hint = "numSpeculativeTokens guesses tokens ahead"
            raise BadRequest("", f"plugin_type may name {', '.join(_PLUGINS)}; {hint}, got {shown(name)}")


def _texts(meaning: str, *names: str) -> dict[str, Key]:
    return {name: Key(str, meaning, longest=4096) for name in names}


def _lists(meaning: str, *names: str) -> dict[str, Key]:
    return {name: Key(list, meaning, items=str, longest=4096) for name in names}


def _numbers(meaning: str, *names: str) -> dict[str, Key]:
    return {name: Key(int, meaning) for name in names}


SERVER_KEYS: Mapping[str, Key] = {
    **_texts(
        _OTHER_TLS, "managementTlsCert", "managementTlsPk", "managementTlsPkPwd", "managementTlsCrl",
        "managementTlsCrlPath", "metricsTlsCert", "metricsTlsPk", "metricsTlsPkPwd", "metricsTlsCrl",
        "metricsTlsCrlPath",
    ),
    **_lists(_OTHER_TLS, "managementTlsCaFile", "managementTlsCrlFiles", "metricsTlsCaFile", "metricsTlsCrlFiles"),
    "interCommTLSEnabled": Key(bool, _ELSEWHERE),
    "interCommPort": Key(int, _ELSEWHERE, 1024, 65535),
    **_texts(
        _ELSEWHERE, "interCommTlsCaPath", "interCommTlsCaFile", "interCommTlsCert", "interCommPk", "interCommPkPwd",
        "interCommTlsCrl", "interCommTlsCrlPath",
    ),
    **_lists(_ELSEWHERE, "interCommTlsCaFiles", "interCommTlsCrlFiles"),
    "distDPServerEnabled": Key(bool, "one server holds the model", choices=(False,)),
}  # fmt: skip
BACKEND_KEYS: Mapping[str, Key] = {
    "multiNodesInferEnabled": Key(bool, "a model's ranks are on one machine", choices=(False,)),
    "multiNodesInferPort": Key(int, _ELSEWHERE, 1024, 65535),
    "interNodeTLSEnabled": Key(bool, _ELSEWHERE),
    **_texts(
        _ELSEWHERE, "interNodeTlsCaPath", "interNodeTlsCaFile", "interNodeTlsCert", "interNodeTlsPk",
        "interNodeTlsPkPwd", "interNodeTlsCrl", "interNodeTlsCrlPath", "interNodeKmcKsfMaster",
        "interNodeKmcKsfStandby",
    ),
    **_lists(_ELSEWHERE, "interNodeTlsCaFiles", "interNodeTlsCrlFiles"),
}  # fmt: skip
MODEL_KEYS: Mapping[str, Key] = {
    **_numbers("of a transfer between machines", "kv_trans_timeout", "kv_link_timeout"),
    "async_scheduler_wait_time": Key(int, "steps are planned while the last one runs, always", 1, 3600),
    "plugin_params": Key(
        (str, dict), "prefix caching and chunked prefill, which are always on", check_more=check_plugins
    ),
    "models": Key((dict, str), "options of a model class elsewhere"),
    "ignore_eos": Key(bool, "requests ask for it themselves", choices=(False,)),
    **{name: Key(int, "a model is shared by tensors alone", choices=(-1, 1)) for name in ("dp", "cp", "sp")},
    "tp": Key(int, "worldSize, in other words", -1, 64, setting="tp"),
    "moe_tp": Key(int, "no model here has experts", choices=(-1, 1)),
    "moe_ep": Key(int, "no model here has experts", choices=(-1, 1)),
}
SCHEDULE_KEYS: Mapping[str, Key] = {
    "maxFirstTokenWaitTime": Key(int, "the policies bound the wait", 0, 3_600_000),
    **_numbers(
        "prefills share every step", "prefillChunkSize", "maxNumPartialPrefills", "longPrefillTokenThreshold",
        "maxLongPartialPrefills",
    ),
}  # fmt: skip
LOG_KEYS: Mapping[str, Key] = {
    "dynamicLogLevel": Key(str, "logLevel is of the start"),
    "dynamicLogLevelValidHours": Key(int, "of dynamicLogLevel", 1, 168),
    "dynamicLogLevelValidTime": Key(str, "of dynamicLogLevel"),
}
TOP_KEYS: Mapping[str, Key] = {"EnableDynamicAdjustTimeoutConfig": Key(bool, "time limits are those of the file")}
