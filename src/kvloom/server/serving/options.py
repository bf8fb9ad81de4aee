"""WireOptions: choices of a configuration where the specification, later releases and the protocols disagree."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Defaults are what both the specification's samples and today's clients understand."""

    validates_model: bool = False  # a wrong `model` gives 404; otherwise the default model answers (spec 3.3.2.3.3)
    max_input_chars: int = 16000  # longest prompt in characters on the TGI, vLLM, Triton and native routes (spec 3.3.2)
    is_full_text: bool = False  # vLLM streams repeat prompt and whole text in every event, as vLLM 0.2.6 does
    is_root_object: bool = False  # POST / answers an object, as spec 3.3.2.1.3 prints, not TGI's array
    is_input_echoed: bool = False  # Triton infer puts the prompt's ids before the answer's
    has_oip_health: bool = False  # health bodies of the Open Inference Protocol on /v2/health
    default_max_tokens: int | None = None  # of /v1 requests without one; None = until the end of the sequence
    lora_root: Path | None = None  # folder below which adapters may be loaded at run time; None = they may not
    keeps_responses: bool = False  # there is a store of responses
