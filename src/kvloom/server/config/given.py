"""Checks settings that do not come from a config.json, by the key that bounds the same setting there."""

from collections.abc import Mapping
from typing import Any

from kvloom.server.config.key import Key
from kvloom.server.config.keys import LAYOUT_2, keys_of

KEYS: Mapping[str, Key] = {key.setting: key for _, key in keys_of(LAYOUT_2) if key.setting}  # by setting
# options take more than the file: every port, one of several devices ("cuda:1")
_WIDER = ("port", "device")


def check_given(name: str, setting: str, value: Any) -> None:
    """Raises BadRequest that calls a value `name` when config.json would not take it; None = not given.

    Paths are left to whoever opens them: the file system takes names that no JSON text holds.
    """
    key = KEYS.get(setting)
    if value is None or key is None or setting in _WIDER or not isinstance(value, key.types):
        return
    key.check(name, value)
