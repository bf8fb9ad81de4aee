"""The families of models, by the architecture name that a checkpoint states."""

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.llama import LLAMA
from kvloom.checkpoints.families.mistral import MISTRAL
from kvloom.checkpoints.families.qwen2 import QWEN2
from kvloom.checkpoints.families.qwen3 import QWEN3
from kvloom.contract.errors import ModelError

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "llama": LLAMA,  # general.architecture of GGUF from here on
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}


def family_of(architecture: str, file: str) -> Family:
    """Raises ModelError listing the known architectures when this one is not among them."""
    if architecture not in FAMILIES:
        raise ModelError(f"{file}: architecture {architecture!r} is not known; known are {', '.join(FAMILIES)}")
    return FAMILIES[architecture]
