"""Assistants of Gemma 4: small models that guess for a larger one from its states, embeddings and keys.

They have no keys of their own: a layer with a window reads those of the model's last layer with a window, any other
those of its last one without (transformers' gemma4_assistant, llama.cpp's gemma4-assistant).
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvloom.checkpoints.checkpoint import Checkpoint
from kvloom.checkpoints.families.mixers import Attention, Keyed, Rope
from kvloom.contract.errors import ModelError


def assistant_of(model: Checkpoint, assistant: Checkpoint) -> Checkpoint:
    """`assistant` with layers that read those of `model`. Raises ModelError that names what does not fit."""
    own, spec = assistant.spec, model.spec
    if own.family != spec.family or spec.assists:
        raise ModelError(f"it assists models of {own.family}, and {model.path} is of {spec.family}")
    _check("backbone_hidden_size", own.assists, spec.hidden)
    _check("vocab_size", own.vocab_size, spec.vocab_size)
    last = {mixer.window is not None: (index, mixer) for index, mixer in spec.cached}
    mixers = [_reading(index, mixer, last) for index, mixer in own.attention]
    return replace(assistant, spec=own.with_mixers(mixers))


def _reading(index: int, own: Keyed, last: Mapping[bool, tuple[int, Keyed]]) -> Attention:
    """A layer that reads the last one of its kind; `last`: by whether it has a window. Its token stands one behind the
    keys, which the kernels take for its own: so it sees one key fewer.
    """
    assert isinstance(own, Attention), "an assistant's layers have attention"
    has_window = own.window is not None
    if has_window not in last:
        kind = "a" if has_window else "no"
        raise ModelError(f"layer_types: layer {index} has {kind} window, and no layer of the model with keys has")
    read, of_model = last[has_window]
    for name, one, other in (
        ("head_dim", own.head_dim, of_model.head_dim),
        ("num_key_value_heads", own.num_kv_heads, of_model.num_kv_heads),
        ("sliding_window", own.window, of_model.window),
    ):
        _check(name, one, other)
    if not _are_alike(own.rope, of_model.rope):
        raise ModelError(f"rope_parameters: those of layer {index} are not those of the model's layer {read}")
    if own.window == 1:
        raise ModelError("sliding_window: 1 leaves no key to read")
    return replace(own, keys_of=read, window=None if own.window is None else own.window - 1)


def _check(name: str, own: object, of_model: object) -> None:
    if own != of_model:
        raise ModelError(f"{name} is {own}, that of the model {of_model}")


def _are_alike(own: Rope | None, other: Rope | None) -> bool:
    """Whether both turn by the same angles; files of different formats may differ in last digits."""
    if own is None or other is None or own.dim != other.dim:
        return own is other
    return bool(np.allclose(own.inv_freq, other.inv_freq, rtol=1e-4, atol=1e-12))
