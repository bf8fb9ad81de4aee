"""Writers of quantised folders, each written from its format's definition, and the weights that the folders stand for.

They use Python integers, one word at a time, and share no code with the readers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, tuple[int, int], torch.Generator], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """`write` returns a matrix's tensors and the matrix that they mean; `config` the folder's quantization_config."""

    config: Mapping[str, Any]
    write: Writer
    form: str = ""
    left: Sequence[str] = field(default=("lm_head", "embed_tokens"))  # ends of names of modules not quantised


def words(rows: Sequence[Sequence[int]], bits: int) -> torch.Tensor:
    """Packs rows of numbers into int32 [rows, numbers / per], per = 32 / bits; the first is in the lowest bits."""
    per, mask = 32 // bits, (1 << bits) - 1

    def word(numbers: Sequence[int]) -> int:
        value = sum((number & mask) << (bits * position) for position, number in enumerate(numbers))
        return value - (1 << 32) if value >= 1 << 31 else value

    return torch.tensor([[word(row[i : i + per]) for i in range(0, len(row), per)] for row in rows], dtype=torch.int32)


def drawn(shape: tuple[int, int], groups: int, bits: int, dice: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random quantised weights: numbers [out, in], zeros and scales [out, groups]."""
    rows, cols = shape
    numbers = torch.randint(0, 1 << bits, shape, generator=dice)
    middle = 1 << (bits - 1)
    zeros = torch.randint(middle - middle // 2, middle + middle // 2, (rows, groups), generator=dice)
    scales = (torch.rand((rows, groups), generator=dice) + 0.5) * 2 * cols**-0.5 / middle
    return numbers, zeros, scales.to(torch.float16)


def value(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    run = numbers.shape[1] // zeros.shape[1]
    zeros, scales = (part.repeat_interleave(run, 1) for part in (zeros, scales))
    return (numbers - zeros).float() * scales.float()


def awq(group: int, is_symmetric: bool = False) -> Writer:
    """A writer of AWQ; of symmetric numbers all zeros are 8, as AutoRound writes them."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = drawn(shape, shape[1] // group, 4, dice)
        zeros = torch.full_like(zeros, 8) if is_symmetric else zeros

        def packed(part: torch.Tensor) -> torch.Tensor:
            columns = part.T.tolist()
            return words(
                [[row[i + position] for i in range(0, len(row), 8) for position in AWQ_ORDER] for row in columns], 4
            )

        tensors = {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
        return named(base, tensors), value(numbers, zeros, scales)

    return write


def gptq(bits: int, group: int | None, order: Sequence[int] | None = None, missing: int = 1) -> Writer:
    """A writer of GPTQ. `order`: the group of each column; `missing`: subtracted from the zeros that are stored."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        run = group or shape[1]
        numbers, zeros, scales = drawn(shape, shape[1] // run, bits, dice)
        of = (
            torch.arange(shape[1]) // run
            if order is None
            else torch.tensor([g % zeros.shape[1] for g in order[: shape[1]]])
        )
        tensors = {
            "qweight": words(numbers.tolist(), bits).T.contiguous(),
            "qzeros": words((zeros.T - missing).tolist(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": of.to(torch.int32),
        }
        return named(base, tensors), (numbers - zeros[:, of]).float() * scales[:, of].float()

    return write


def compressed(bits: int, group: int | None, is_symmetric: bool = True, is_packed: bool = True) -> Writer:
    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = drawn(shape, shape[1] // (group or shape[1]), bits, dice)
        middle = 1 << (bits - 1)
        if is_symmetric:
            zeros = torch.full_like(zeros, middle)
        scales = scales.to(torch.bfloat16)
        tensors = {"weight_scale": scales}
        if is_packed:
            tensors |= {"weight_packed": words(numbers.tolist(), bits), "weight_shape": torch.tensor(shape)}
        else:
            tensors["weight"] = (numbers - middle).to(torch.int8)
        if not is_symmetric and is_packed:
            tensors["weight_zero_point"] = words(zeros.T.tolist(), bits).T.contiguous()
        elif not is_symmetric:
            tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
        return named(base, tensors), value(numbers, zeros, scales)

    return write


def rotated(write: Writer, end: str = "", size: int = 0) -> Writer:
    """Matrices whose names end with `end` are stored for inputs that are rotated, `size` together (0 = all)."""

    def write_rotated(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        tensors, weight = write(base, shape, dice)
        if not base.endswith(end):
            return tensors, weight
        signs = torch.ones(1, 1)
        own = size or shape[1]
        while len(signs) < own:
            signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), signs)
        blocks = weight.reshape(shape[0], -1, own) @ signs / own**0.5
        return tensors | named(base, {"R4_input.weight": signs}), blocks.reshape(shape)

    return write_rotated


def fp8(scale_shape: Callable[[int, int], tuple[int, ...]], name: str = "weight_scale", block: int = 0) -> Writer:
    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = torch.randn(shape, generator=dice).mul(40).to(torch.float8_e4m3fn)
        scales = (torch.rand(scale_shape(*shape), generator=dice) + 0.5) * shape[1] ** -0.5 / 40
        wide = scales
        if block:
            wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]
        return named(base, {"weight": weight, name: scales}), weight.float() * wide

    return write


def fp8_static(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """One scale a matrix and one of its activations, as transformers' FP8Linear saves them."""
    tensors, weight = fp8(lambda rows, cols: (), "weight_scale_inv")(base, shape, dice)
    return tensors | named(base, {"activation_scale": torch.tensor(0.02)}), weight


def exponents(kind: torch.dtype, high: int, wide: int, name: str = "weight_scale") -> Writer:
    """A writer of FP8 with scales that are powers of two, one a block of `high` x `wide` weights."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = torch.randn(shape, generator=dice).mul(40).to(torch.float8_e4m3fn)
        sizes = (-(-shape[0] // high), -(-shape[1] // wide))
        powers = torch.randint(117, 120, sizes, generator=dice)
        scales = torch.exp2(powers - 127.0)
        whole = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: shape[0], : shape[1]]
        return named(base, {"weight": weight, name: powers.to(torch.uint8).view(kind)}), weight.float() * whole

    return write


def mxfp4(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.randint(0, 16, shape, generator=dice)
    exponents = torch.randint(120, 125, (shape[0], shape[1] // 32), generator=dice)
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    tensors = {"weight_packed": pairs.to(torch.uint8), "weight_scale": exponents.to(torch.uint8)}
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)])[numbers]
    return named(base, tensors), levels * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)


def nvfp4(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.randint(0, 16, shape, generator=dice)
    scales = (torch.rand(shape[0], shape[1] // 16, generator=dice) * 400 + 20).to(torch.float8_e4m3fn)
    whole = torch.tensor([4096.0])
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    tensors = {"weight_packed": pairs.to(torch.uint8), "weight_scale": scales, "weight_global_scale": whole}
    tensors["input_global_scale"] = torch.tensor([300.0])
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)])[numbers]
    return named(base, tensors), levels * (scales.float() / whole).repeat_interleave(16, 1)


def named(base: str, tensors: Tensors) -> Tensors:
    return {f"{base}.{end}": tensor for end, tensor in tensors.items()}


def group_config(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def per_token(config: dict[str, Any], **activations: Any) -> dict[str, Any]:
    """`config` with 8-bit activations, one dynamic scale per token. `activations`: other fields; None removes one."""
    own = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, **activations}
    own = {name: value for name, value in own.items() if value is not None}
    (group,) = config["config_groups"].values()
    return {**config, "config_groups": {"group_0": {**group, "input_activations": own}}}


def write_folder(model: Any, folder: Path, of: Format) -> Path:
    """Writes `model` as a folder in format `of`, and sets its weights to the values that the folder means."""
    dice = torch.Generator().manual_seed(1)
    model.save_pretrained(folder)  # one file, in which each expert has its own tensors
    file = folder / "model.safetensors"
    packed: Tensors = {}
    meant: Tensors = {}
    for key, weight in load_file(file).items():
        base = key.removesuffix(".weight")
        if weight.dim() < 2 or base.endswith(tuple(of.left)):
            packed[key] = meant[key] = weight
            continue
        own, meant[key] = of.write(base, tuple(weight.shape), dice)
        packed |= own
    save_file(meant, file, {"format": "pt"})
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    save_file(packed, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": of.config}))
    return folder
