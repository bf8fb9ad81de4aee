"""Writers of matrices as GPTQModel, AutoAWQ, torchao and bitsandbytes lay them out; see quantized.py."""

import json
from collections.abc import Sequence

import torch

from tests.support.models.quantized import Tensors, Writer, drawn, named, value, words

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def stream(rows: Sequence[Sequence[int]], bits: int) -> torch.Tensor:
    """Packs rows of numbers into int32, lowest bits first; a number may go on in the next word."""

    def row_of(row: Sequence[int]) -> list[int]:
        whole = sum(number << (bits * position) for position, number in enumerate(row))
        found = [whole >> (32 * i) & 0xFFFFFFFF for i in range(len(row) * bits // 32)]
        return [word - (1 << 32) if word >= 1 << 31 else word for word in found]

    return torch.tensor([row_of(row) for row in rows], dtype=torch.int32)


def gptq_stream(bits: int, group: int) -> Writer:
    """GPTQ whose numbers do not fill a word."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = drawn(shape, shape[1] // group, bits, dice)
        tensors = {
            "qweight": stream(numbers.tolist(), bits).T.contiguous(),
            "qzeros": stream((zeros.T - 1).tolist(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(shape[1]) // group).to(torch.int32),
        }
        return named(base, tensors), value(numbers, zeros, scales)

    return write


def gemv(group: int, width: int) -> Writer:
    """AWQ's GEMV format; rows of zeros fill a multiple of `width` words."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = drawn(shape, shape[1] // group, 4, dice)
        wide = -(-zeros.shape[1] // (8 * width)) * width
        room = torch.zeros(shape[0], 8 * wide - zeros.shape[1])
        tensors = {
            "qweight": words(numbers.tolist(), 4),
            "qzeros": words(torch.cat([zeros, room.long()], 1).tolist(), 4),
            "scales": torch.cat([scales, room.to(scales.dtype)], 1),
        }
        return named(base, tensors), value(numbers, zeros, scales)

    return write


def by_name(rules: Sequence[tuple[str, Writer]], other: Writer) -> Writer:
    """The writer of the first rule whose text is in a matrix's name."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        return next((writer for part, writer in rules if part in base), other)(base, shape, dice)

    return write


def torchao_ints(bits: int, group: int | None, is_symmetric: bool = True, has_zeros: bool = True) -> Writer:
    """torchao's Int8Tensor and IntxUnpackedToInt8Tensor: a byte a number."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = drawn(shape, shape[1] // (group or shape[1]), bits, dice)
        middle = 1 << (bits - 1)
        zeros = torch.full_like(zeros, middle) if is_symmetric else zeros
        scales = scales.to(torch.bfloat16)
        tensors = {"_weight_qdata": (numbers - middle).to(torch.int8), "_weight_scale": scales}
        if has_zeros:
            tensors["_weight_zero_point"] = (zeros - middle).to(torch.int8)
        return named(base, tensors), value(numbers, zeros, scales)

    return write


def torchao_pairs(group: int) -> Writer:
    """torchao's Int4Tensor: weight = number * scale + zero point, numbers from -8 to 7."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, _, scales = drawn(shape, shape[1] // group, 4, dice)
        numbers, scales = numbers - 8, scales.to(torch.bfloat16)
        least = (torch.randn(scales.shape, generator=dice) * scales.float()).to(torch.bfloat16)
        pairs = (numbers[:, ::2] & 15) | (numbers[:, 1::2] & 15) << 4
        tensors = {
            "_weight_qdata": pairs.to(torch.uint8),
            "_weight_scale": scales.T.contiguous(),
            "_weight_zero_point": least.T.contiguous(),
        }
        wide, low = (part.float().repeat_interleave(group, 1) for part in (scales, least))
        return named(base, tensors), numbers.float() * wide + low

    return write


def torchao_fp8(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    weight = torch.randn(shape, generator=dice).mul(40).to(torch.float8_e4m3fn)
    scales = (torch.rand((shape[0], 1), generator=dice) + 0.5) * shape[1] ** -0.5 / 40
    return named(base, {"_weight_qdata": weight, "_weight_scale": scales}), weight.float() * scales


def inverse_fp8(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """GPTQModel's: what is stored divides the numbers, unlike elsewhere under this name."""
    weight = torch.randn(shape, generator=dice).mul(40).to(torch.float8_e4m3fn)
    scales = 40 * shape[1] ** 0.5 / (torch.rand(shape[0], generator=dice) + 0.5)
    return named(base, {"weight": weight, "weight_scale_inv": scales}), weight.float() / scales[:, None]


def bitsandbytes_rows(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.randint(-127, 128, shape, generator=dice)
    largest = (torch.rand(shape[0], generator=dice) + 0.5) * 2 * shape[1] ** -0.5
    format = torch.tensor(0, dtype=torch.uint8)
    tensors = {"weight": numbers.to(torch.int8), "SCB": largest, "weight_format": format}
    return named(base, tensors), numbers.float() * (largest / 127)[:, None]


def bitsandbytes_blocks(
    kind: str = "nf4", block: int = 64, nested: int = 0, storage: torch.dtype = torch.uint8
) -> Writer:
    """4-bit indices; `nested`: factors that share one of their own, 0 = they are floats. `storage`: of the bytes."""

    def write(base: str, shape: tuple[int, int], dice: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        indices = torch.randint(0, 16, (shape[0] * shape[1],), generator=dice)
        table = torch.tensor(NF4) if kind == "nf4" else torch.randn(16, generator=dice)
        num_blocks = -(-len(indices) // block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(shape)}
        scales = (torch.rand(num_blocks, generator=dice) + 0.5) * shape[1] ** -0.5
        tensors = {"weight.absmax": scales, "weight.quant_map": table}
        if nested:
            steps, offset = torch.randint(0, 256, (num_blocks,), generator=dice), 0.25 * shape[1] ** -0.5
            own, whole = torch.linspace(-1, 1, 256), torch.rand(-(-num_blocks // nested), generator=dice) * 0.02
            scales = own[steps] * whole.repeat_interleave(nested)[:num_blocks] + offset
            tensors |= {"weight.absmax": steps.to(torch.uint8), "weight.nested_absmax": whole}
            tensors["weight.nested_quant_map"] = own
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        pairs = (indices[::2] << 4 | indices[1::2]).to(torch.uint8)
        tensors["weight"] = pairs.view(storage)[:, None]
        encoded = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = encoded
        weight = table[indices] * scales.repeat_interleave(block)[: len(indices)]
        return named(base, tensors), weight.reshape(shape)

    return write
