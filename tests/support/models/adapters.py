"""LoRA adapters as peft saves them, and the merged weights for comparison."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_down": "self_attn.q_a_proj",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
}
TINY_SHAPES = {"layers.0.q": (8, 8), "layers.0.v": (4, 8)}  # for no particular model: the fake model accepts any


def make_adapter(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    seed: int = 0,
    rank: int = 4,
    parts: Sequence[str] = tuple(PARTS),
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    **config: Any,
) -> Path:
    """A random adapter of the linears `parts` among `shapes` (canonical names), strong enough to change answers.

    `config` goes into adapter_config.json. rank_pattern there is by module name, such as "q_proj".
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        part = name.rsplit(".", 1)[-1]
        if not name.startswith("layers.") or ".experts." in name or part not in parts or len(shape) != 2:
            continue
        own = config.get("rank_pattern", {}).get(PARTS[part].split(".")[1], rank)
        at = f"base_model.model.model.layers.{name.split('.')[1]}.{PARTS[part]}"
        a = torch.randn(own, shape[1], generator=generator) * shape[1] ** -0.5
        b = torch.randn(shape[0], own, generator=generator) * size * own**-0.5
        tensors |= {f"{at}.lora_A.weight": a.to(dtype), f"{at}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": [PARTS[part].split(".")[1] for part in parts],
        "base_model_name_or_path": "tiny",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def merged(values: Mapping[str, torch.Tensor], folder: Path, scales: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """The weights (canonical names) with the adapter merged in: W + scale B A. `scales` by part, "" = all other
    parts.
    """
    tensors = load_file(folder / "adapter_model.safetensors")
    result = dict(values)
    for name, value in values.items():
        part = name.rsplit(".", 1)[-1]
        if name.startswith("layers.") and ".experts." not in name and part in PARTS:
            at = f"base_model.model.model.layers.{name.split('.')[1]}.{PARTS[part]}"
            if f"{at}.lora_A.weight" in tensors:
                a, b = tensors[f"{at}.lora_A.weight"].double(), tensors[f"{at}.lora_B.weight"].double()
                result[name] = (value.double() + scales.get(part, scales[""]) * b @ a).float()
    return result


MODULES = (
    "linear_attn",
    "self_attn",
    "forget_gate",
    "mlp",
    "conv",
    "feed_forward",
    "shared_mlp",
    "mamba",
    "mixer",
)  # of layers


def adapted(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Write a random adapter of all linears that MODULES have themselves, as peft names them. Returns the model with it
    merged in.
    """
    merged, tensors, dice = copy.deepcopy(model), {}, torch.Generator().manual_seed(1)
    has_experts = bool(getattr(model.config, "num_local_experts", 0))
    for name, linear in merged.named_modules():
        owner = name.split(".")[-2] if "." in name else ""
        if not isinstance(linear, torch.nn.Linear) or owner not in MODULES or name.endswith(("gate", "kv_b_proj")):
            continue
        if owner == "shared_mlp" and has_experts:
            continue
        rows, columns = linear.weight.shape
        a = torch.randn(3, columns, generator=dice) * columns**-0.5
        b = torch.randn(rows, 3, generator=dice) * 0.3
        linear.weight.data += 2 * b @ a
        tensors |= {f"base_model.model.{name}.lora_{side}.weight": value for side, value in (("A", a), ("B", b))}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    document = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return merged
