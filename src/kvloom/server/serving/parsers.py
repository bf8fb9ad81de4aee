"""The names of the forms in which models write calls and reasoning, those of vLLM and SGLang among them.

What stands behind the names is in server/chat/form.py. Sources: the registries of vLLM 0.32.0 (tool_parsers, reasoning)
and of SGLang 0.5.23 (function_call, reasoning_parser). Names of forms that are not known here are refused.
"""

from collections.abc import Mapping
from types import MappingProxyType

_CALLS = {
    "hermes": ("qwen", "qwen25", "qwen3_json", "trinity", "granite4"),
    "qwen3_coder": ("qwen3_xml", "mimo", "nanbeige", "step3p5"),
    "llama3": ("llama3_json", "llama4_json"),
    "mistral": (),
    "mistral_list": (),
    "glm45": ("glm", "glm47", "ling3", "poolside_v1", "spark25"),
    "kimi_k2": (),
    "kimi_k3": (),
    "deepseek_v3": ("deepseekv3",),
    "deepseek_v31": ("deepseekv31",),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "minimax_m2": ("minimax-m2",),
    "minimax_m3": ("minimax-m3",),
    "minimax_m1": ("minimax",),
    "seed_oss": (),
    "pythonic": ("lfm2",),
    "functionary": (),
    "gemma4": (),
    "granite": (),
    "apriel": (),
    "harmony": ("openai", "gpt-oss", "gpt_oss"),
    "llm_jp": (),
    "atem": ("muse", "muse_glimmer"),
    "functionary_v3.2": (),
}
_REASONING = {
    "think": (
        "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "qwen3", "qwen3-thinking", "glm45", "kimi_k2",
        "minimax", "minimax_m2", "minimax-append-think", "minimax_m2_append_think", "ernie45", "olmo3", "step3",
        "step3p5", "holo2", "nemotron_v3", "nemotron_3", "interns1", "mimo", "glm47", "ling3", "poolside_v1",
    ),
    "mistral": (),
    "seed_oss": (),
    "kimi": (),
    "minimax_m3": ("minimax-m3",),
    "kimi_k3": (),
    "cohere": ("command_r", "cohere_command3"),
    "gemma4": (),
    "harmony": ("openai_gptoss", "gpt-oss", "gpt_oss"),
    "atem": ("muse", "muse_glimmer"),
    "none": ("identity",),
}  # fmt: skip


def _by_name(forms: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    return MappingProxyType({name: form for form, others in forms.items() for name in (form, *others)})


TOOL_PARSERS = _by_name(_CALLS)  # every name of a form of calls -> the form's own name
REASONING_PARSERS = _by_name(_REASONING)
