"""cpu_abi.py mirrors cpu/abi.h: structs, functions and numbers are those of the header."""

import ctypes
from pathlib import Path

from kvloom.rank.kernels import cpu_abi
from tests.support.layouts import functions, structs, wrong

HEADER = Path(cpu_abi.__file__).parent / "cpu" / "abi.h"
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "kvl_shape": cpu_abi.Shape,
    "kvl_instruction": cpu_abi.Instruction,
    "kvl_mixture": cpu_abi.Mixture,
    "kvl_attention": cpu_abi.AttentionShape,
    "kvl_latent": cpu_abi.LatentShape,
    "kvl_delta_rule": cpu_abi.DeltaRuleShape,
    "kvl_short_conv": cpu_abi.ShortConvShape,
    "kvl_convolution": cpu_abi.Convolution,
    "kvl_mamba2": cpu_abi.Mamba2Shape,
    "kvl_batch": cpu_abi.Batch,
    "kvl_numbers": cpu_abi.FileNumbers,
    "kvl_draw_rules": cpu_abi.DrawRules,
}
OWN = ("NONE", "OUT_OF_MEMORY")  # results, which the header has as words
NUMBERS = {
    name: value
    for name, value in vars(cpu_abi).items()
    if name.isupper() and isinstance(value, int) and not name.startswith("_") and name not in OWN
}


def test_structs_functions_and_numbers_are_those_of_the_header():
    numbers = [f'static_assert(KVL_{name} == {value}, "{name}");' for name, value in NUMBERS.items()]
    assert len(numbers) > 40
    assert wrong(HEADER, [*structs(STRUCTS), *functions(cpu_abi.SIGNATURES), *numbers]) == []


def test_what_differs_is_found():
    """A field too few, a field of another size, other arguments, another number."""

    class Short(ctypes.Structure):
        _fields_ = cpu_abi.Instruction._fields_[:-1]

    class Wide(ctypes.Structure):
        _fields_ = (("temperature", ctypes.c_double), *cpu_abi.DrawRules._fields_[1:])

    result, arguments = cpu_abi.SIGNATURES["kvl_use"]
    cases = {
        "size of kvl_instruction": structs({"kvl_instruction": Short}),
        "kvl_draw_rules.temperature": structs({"kvl_draw_rules": Wide}),
        "kvl_use": functions({"kvl_use": (result, arguments[1:])}),
        "kvl_uniform": functions({"kvl_uniform": (ctypes.c_int64, [ctypes.c_uint64] * 2)}),
        "INT4": ['static_assert(KVL_INT4 == 2, "INT4");'],
    }
    for name, assertions in cases.items():
        assert any(name in line for line in wrong(HEADER, assertions)), name
