"""The families of models, by the architecture named in a checkpoint."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.bert import BERT, ROBERTA
from kvloom.checkpoints.families.known.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from kvloom.checkpoints.families.known.deepseek_gguf import DEEPSEEK_GGUF, MISTRAL4_GGUF
from kvloom.checkpoints.families.known.ernie import ERNIE, ERNIE_MOE
from kvloom.checkpoints.families.known.exaone import EXAONE4
from kvloom.checkpoints.families.known.falcon_h1 import FALCON_H1, FALCON_H1_GGUF
from kvloom.checkpoints.families.known.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA_EMBEDDING
from kvloom.checkpoints.families.known.gemma4 import (
    GEMMA4,
    GEMMA4_ASSISTANT,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_ASSISTANT,
)
from kvloom.checkpoints.families.known.glm import GLM, GLM4, GLM4_MOE
from kvloom.checkpoints.families.known.glm_flash import GLM4_MOE_LITE
from kvloom.checkpoints.families.known.granite import GRANITE, GRANITE_MOE, GRANITE_MOE_GGUF, GRANITE_SHARED
from kvloom.checkpoints.families.known.granite_hybrid import GRANITE_HYBRID, GRANITE_HYBRID_GGUF
from kvloom.checkpoints.families.known.hunyuan import HUNYUAN
from kvloom.checkpoints.families.known.kimi import KIMI_LINEAR, KIMI_LINEAR_GGUF
from kvloom.checkpoints.families.known.lfm2 import LFM2, LFM2_GGUF, LFM2_MOE
from kvloom.checkpoints.families.known.llama import EUROBERT, LLAMA, SMOLLM3
from kvloom.checkpoints.families.known.mamba import MAMBA2, MAMBA2_GGUF
from kvloom.checkpoints.families.known.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from kvloom.checkpoints.families.known.mistral4 import MISTRAL4
from kvloom.checkpoints.families.known.mixtures import (
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_MOE_GGUF,
)
from kvloom.checkpoints.families.known.nemotron import NEMOTRON, NEMOTRON_GGUF
from kvloom.checkpoints.families.known.nomic import NOMIC
from kvloom.checkpoints.families.known.olmo import OLMO2, OLMO3
from kvloom.checkpoints.families.known.phi3 import PHI3
from kvloom.checkpoints.families.known.qwen import QWEN2, QWEN3
from kvloom.checkpoints.families.known.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_GGUF,
    QWEN3_5_MOE,
    QWEN3_5_MOE_GGUF,
    QWEN3_NEXT,
    QWEN3_NEXT_GGUF,
)
from kvloom.checkpoints.families.known.seed import SEED
from kvloom.checkpoints.families.known.youtu import YOUTU
from kvloom.contract.errors import ModelError

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": MINISTRAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": MINISTRAL3,  # its text part; the vision part is not read
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,  # its text part; the vision part is not read
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,  # the same, and without its part for sound
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED,  # the same
    "Gemma4AssistantForCausalLM": GEMMA4_ASSISTANT,  # guesses for one of these, and answers nothing itself
    "Gemma4UnifiedAssistantForCausalLM": GEMMA4_UNIFIED_ASSISTANT,  # the same
    "Phi3ForCausalLM": PHI3,
    "GraniteForCausalLM": GRANITE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Ernie4_5ForCausalLM": ERNIE,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "SeedOssForCausalLM": SEED,
    "Exaone4ForCausalLM": EXAONE4,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,  # its text part; the vision part is not read
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,  # the same
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "OlmoeForCausalLM": OLMOE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_SHARED,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "FalconH1ForCausalLM": FALCON_H1,
    "NemotronHForCausalLM": NEMOTRON,
    "Mamba2ForCausalLM": MAMBA2,
    "GptOssForCausalLM": GPT_OSS,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "Mistral4ForCausalLM": MISTRAL4,
    "YoutuForCausalLM": YOUTU,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "LlamaModel": LLAMA,  # without a head from here on: they make embeddings
    "MistralModel": MISTRAL,
    "Qwen2Model": QWEN2,
    "Qwen3Model": QWEN3,
    "Gemma2Model": GEMMA2,
    "Gemma3TextModel": GEMMA3,  # EmbeddingGemma among them
    "BertModel": BERT,
    "bert": BERT,
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    "NomicBertModel": NOMIC,
    "nomic-bert": NOMIC,
    "EuroBertModel": EUROBERT,
    "eurobert": EUROBERT,
    "llama": LLAMA,  # general.architecture of GGUF from here on
    "mistral": MISTRAL,
    "mistral3": MINISTRAL3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma-embedding": GEMMA_EMBEDDING,
    "gemma4": GEMMA4,
    "gemma4-assistant": GEMMA4_ASSISTANT,
    "phi3": PHI3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "glm4": GLM4,
    "ernie4_5": ERNIE,
    "glm4moe": GLM4_MOE,
    "ernie4_5-moe": ERNIE_MOE,
    "hunyuan-dense": HUNYUAN,
    "seed_oss": SEED,
    "exaone4": EXAONE4,
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": QWEN3_MOE_GGUF,
    "lfm2": LFM2_GGUF,
    "lfm2moe": LFM2_MOE,
    "qwen35": QWEN3_5_GGUF,
    "qwen35moe": QWEN3_5_MOE_GGUF,
    "qwen3next": QWEN3_NEXT_GGUF,
    "olmoe": OLMOE,
    "granitemoe": GRANITE_MOE_GGUF,
    "granitehybrid": GRANITE_HYBRID_GGUF,
    "falcon-h1": FALCON_H1_GGUF,
    "nemotron_h": NEMOTRON_GGUF,
    "nemotron_h_moe": NEMOTRON_GGUF,
    "mamba2": MAMBA2_GGUF,
    "gpt-oss": GPT_OSS,
    "deepseek2": DEEPSEEK_GGUF,
    "kimi-linear": KIMI_LINEAR_GGUF,
    "mistral4": MISTRAL4_GGUF,
}

_TEXTS = {("Mistral3ForConditionalGeneration", "mistral4"): "Mistral4ForCausalLM"}  # by model_type of the text's part
CLASSIFIER = "ForSequenceClassification"


def text_architecture(architecture: str, config: Mapping[str, Any]) -> str:
    """The architecture of the part that is served, where others of the same name have another text part."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return _TEXTS.get((architecture, str(kind)), architecture)


def has_head(architecture: str) -> bool:
    """Whether its files contain a language-model head."""
    return not architecture.endswith(("Model", "-embedding", CLASSIFIER))


def known_names(is_gguf: bool) -> str:
    """The architectures of GGUF files, or of folders."""
    return ", ".join(name for name in FAMILIES if name[0].islower() == is_gguf)


def family_of(architecture: str, file: str) -> Family:
    """A classifier belongs to its decoder's family. Raises ModelError that lists the known architectures."""
    base = architecture.removesuffix(CLASSIFIER)
    ends = ("ForCausalLM", "Model") if base != architecture else ("",)
    known = next((FAMILIES[base + end] for end in ends if base + end in FAMILIES), None)
    if known is None:
        names = known_names(is_gguf=not file.endswith("config.json"))
        problem = f"{file}: architecture {architecture!r:.80} is not known; known are {names}"
        raise ModelError(f"{problem}; vLLM has more, where it is installed: --backend vllm")
    return known
