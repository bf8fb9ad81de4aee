"""Tensors of a checkpoint that nothing reads: which of them change nothing, and how the others are told."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.checkpoints.families.spec import DecoderSpec

_MOST_NAMED = 3
_LAYER = re.compile(r"(?:\blayers|^blk)\.(\d+)\.")
_KEYS = re.compile(r"self_attn\.[kv]_(proj|norm)\.|attn_[kv](_norm)?\.")
_HARMLESS = re.compile(
    r"(.*\.)?(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|attn\.masked_bias|position_ids"
    r"|weight_shape|(input|output|activation|[qkv])_(global_)?(scale|zero_point))"  # buffers; notes, activations
    r"|(model\.)?mtp\..*|blk\.\d+\.nextn\..*"  # layers that guess further tokens
    r"|masked_embedding\..*|masked_embd_(centroids|ordering)\..*"  # which logits of an assistant need not be computed
    r"|(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\..*"
    r"|(bert\.|roberta\.|nomic_bert\.)?pooler\.dense\.(weight|bias)"  # of encoders, whose states are pooled otherwise
    r"|rope_(freqs|factors_long|factors_short)\.weight|dense_[23]\.weight"
)


def is_harmless(name: str) -> bool:
    """Whether a tensor of this name changes nothing where it is not read."""
    return _HARMLESS.fullmatch(name) is not None


def left_out(names: Sequence[str], config: Mapping[str, Any], spec: DecoderSpec) -> tuple[str, ...]:
    """`names` without those of further layers that guess tokens, if the configuration says that there are some, and
    without keys and values of layers that read another layer's.
    """
    sharing = {index for index, mixer in spec.attention if mixer.keys_of is not None}
    end = spec.num_layers if config.get("num_nextn_predict_layers") else None

    def is_known(name: str) -> bool:
        layer = _LAYER.search(name)
        if layer is None:
            return False
        index, part = int(layer[1]), name[layer.end() :]
        return (end is not None and index >= end) or (index in sharing and _KEYS.match(part) is not None)

    return tuple(name for name in names if not is_known(name))


def told(names: Sequence[str]) -> str:
    """The tensors in a sentence; "" without one."""
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    first = ", ".join(name[:200] for name in names[:_MOST_NAMED])
    return f"{'a tensor that is' if len(names) == 1 else 'tensors that are'} not read: {first}{more}"
