"""Layers that read the keys and values of an earlier one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import Attention
from kvloom.checkpoints.families.spec import Layer
from kvloom.checkpoints.families.values import natural
from kvloom.contract.errors import ModelError


def sharing_layers(layers: Sequence[Layer], config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """`layers` of attention, of which the last num_kv_shared_layers read the keys and values of the last one before
    them that has the same kind: a window, or none. Raises ModelError where there is none.
    """
    num_shared = natural(config, "num_kv_shared_layers")
    first, last_of, found = len(layers) - num_shared, dict[int | None, int](), []
    for index, layer in enumerate(layers):
        own = layer.mixer
        assert isinstance(own, Attention), "layers of other kinds keep no keys"
        if index < first:
            last_of[own.window] = index
            found.append(layer)
            continue
        if own.window not in last_of:
            problem = f"num_kv_shared_layers {num_shared} leaves no layer whose keys layer {index} could read"
            raise ModelError(f"configuration: {problem}")
        found.append(replace(layer, mixer=replace(own, keys_of=last_of[own.window])))
    return tuple(found)
