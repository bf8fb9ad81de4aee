"""Tensors of a checkpoint that nothing reads: which of them change nothing, and how the others are told."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_NAMED = 3
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
_HARMLESS = re.compile(
    r"(.*\.)?(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|attn\.masked_bias|position_ids"
    r"|weight_shape|(input|output|activation|[qkv])_(global_)?(scale|zero_point))"  # buffers; notes, activations
    r"|(model\.)?mtp\..*|blk\.\d+\.nextn\..*"  # layers that guess further tokens
    r"|(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\..*"
    r"|(bert\.|roberta\.)?pooler\.dense\.(weight|bias)"  # of encoders, whose states are pooled otherwise
    r"|rope_(freqs|factors_long|factors_short)\.weight|dense_[23]\.weight"
)


def is_harmless(name: str) -> bool:
    """Whether a tensor of this name changes nothing where it is not read."""
    return _HARMLESS.fullmatch(name) is not None


def left_out(names: Sequence[str], config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """`names` without those of further layers that guess tokens, if the configuration says that there are some."""
    if not config.get("num_nextn_predict_layers"):
        return tuple(names)
    layers = ((name, _LAYER.match(name)) for name in names)
    return tuple(name for name, layer in layers if layer is None or int(layer[1]) < num_layers)


def told(names: Sequence[str]) -> str:
    """The tensors in a sentence; "" without one."""
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    first = ", ".join(name[:200] for name in names[:_MOST_NAMED])
    return f"{'a tensor that is' if len(names) == 1 else 'tensors that are'} not read: {first}{more}"
