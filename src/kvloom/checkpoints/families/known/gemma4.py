"""Gemma 4 (text) and its assistants: layers without a window have heads of other sizes, and may take their values from
their keys; the last layers may read the keys of earlier ones; layers may have inputs of their own, and experts beside
their MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.gemma import logit_softcap
from kvloom.checkpoints.families.known.gemma4_config import DEFAULTS, LAYER_NAMES, UNIFIED, plain_config
from kvloom.checkpoints.families.mixers import UNKNOWN, Attention
from kvloom.checkpoints.families.shared_keys import sharing_layers
from kvloom.checkpoints.families.spec import PROJECTIONS, DecoderSpec, Layer, LayerInputs
from kvloom.checkpoints.families.values import count, flag, natural
from kvloom.contract.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Gemma4(Family):
    is_assistant: bool = False  # see DecoderSpec.assists

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """See Family."""
        config = plain_config({**self.defaults, **config})
        spec, size = Family.spec(self, config), natural(config, "hidden_size_per_layer_input")
        inputs = LayerInputs(size, count(config, "vocab_size_per_layer_input", spec.vocab_size)) if size else None
        if inputs and inputs.num_tokens < spec.vocab_size:
            raise ModelError(f"gemma4 with layers' inputs for {inputs.num_tokens} of {spec.vocab_size} tokens")
        wide = 2 * spec.intermediate if flag(config, "use_double_wide_mlp") else None
        takes_keys = flag(config, "attention_k_eq_v")
        layers = spec.layers if self.is_assistant else sharing_layers(spec.layers, config)
        if self.is_assistant and (inputs or spec.experts or wide):
            raise ModelError("gemma4: an assistant has neither experts, nor layers' inputs, nor MLPs of two widths")

        def finished(layer: Layer) -> Layer:
            own = layer.mixer
            assert isinstance(own, Attention), "there are no other layers"
            mixer = replace(own, values_are_keys=takes_keys and own.window is None)
            if self.is_assistant:
                return replace(layer, mixer=replace(mixer, keys_of=UNKNOWN))
            return replace(layer, mixer=mixer, intermediate=None if own.keys_of is None else wide)

        spec = replace(spec, layers=tuple(map(finished, layers)), layer_inputs=inputs)
        if not self.is_assistant:
            return spec
        return replace(spec, assists=count(config, "backbone_hidden_size"), logit_softcap=0.0)


GEMMA4 = _Gemma4(
    "gemma4",
    qk_norm="head",
    norms="both",
    mixture=Mixture(is_optional=True, has_dense=True),
    stacking="gate_up",
    names=LAYER_NAMES,
    defaults=DEFAULTS,
    fields=lambda config: {
        "embed_scale": math.sqrt(count(config, "hidden_size")),
        "attention_scale": 1.0,
        "logit_softcap": logit_softcap(config),
        "norms_values": True,
        "scales_layers": True,
    },
)
GEMMA4_UNIFIED = replace(GEMMA4, defaults=DEFAULTS | UNIFIED)  # of another configuration class
GEMMA4_ASSISTANT = replace(
    GEMMA4,
    is_assistant=True,
    names=LAYER_NAMES | {name: f"{name}.weight" for name in PROJECTIONS},
    gguf_names={name: f"nextn.{name}.weight" for name in PROJECTIONS},
    defaults=DEFAULTS | {"backbone_hidden_size": 1536},
)
_UNIFIED_ASSISTANT = DEFAULTS | UNIFIED | {"backbone_hidden_size": 3840}
GEMMA4_UNIFIED_ASSISTANT = replace(GEMMA4_ASSISTANT, defaults=_UNIFIED_ASSISTANT)
