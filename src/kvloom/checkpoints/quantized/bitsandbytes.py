"""bitsandbytes' folders: bytes with a scale a row, or 4-bit indices into a table of 16 numbers. As of 0.50."""

from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.settings import Settings

_ENDS = (("weight_scale", ".SCB"), ("weight_format", ".weight_format"))


def bitsandbytes_scheme(fields: Settings) -> Scheme:
    """Raises ModelError that names the field. Matrices that were left out are told by their tensors."""
    fields.only_known(
        *("quant_method", "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"),
        *("llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
        *("bnb_4bit_quant_storage", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
    )
    if fields.one_of("load_in_4bit", (True, False), False):
        fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        return Scheme("codebook", 4, None)
    fields.one_of("load_in_8bit", (True,), None)
    return Scheme("bytes", 8, None, ends=_ENDS, divisor=127.0)
