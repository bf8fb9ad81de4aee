"""Scheme: how the matrices of a folder are packed."""

from dataclasses import dataclass

from kvloom.checkpoints.quantized.rotations import Rotation, is_meant


@dataclass(frozen=True, slots=True)
class Scheme:
    """The layout of numbers in a folder's tensors (packed.py): weight = (number - zero) * scale.

    `layout`: "awq", "awq_gemv", "gptq", "packed" (compressed-tensors, several in a word), "bytes" (one each), "fp8",
    "mxfp4", "nvfp4", "mxfp4_experts" (gpt-oss's), "pairs" (torchao's int4), "codebook" (bitsandbytes' 4 bits).
    """

    layout: str
    bits: int
    group: int | None  # weights of a row that share a scale; None = all
    has_zeros: bool = False  # the file has a zero for each group; otherwise the zero is the middle
    zero_shift: int = 0  # must be added to the file's zeros
    blocks: tuple[int, int] | None = None  # of fp8: [out, in] weights that share a scale
    per_token: bool = False  # activations are meant to have 8 bits, and one scale a token
    rotations: tuple[Rotation, ...] = ()  # of inputs of linears
    ends: tuple[tuple[str, str], ...] = ()  # (end of a tensor's name in packed.wanted, its end in the files)
    divisor: float = 1.0  # of the file's scales
    divides: bool = False  # numbers are divided by the file's scales
    # (target, its scheme) where a folder has several; the first that names a matrix holds
    by_target: tuple[tuple[str, "Scheme"], ...] = ()

    def of(self, module: str) -> "Scheme | None":
        """The scheme of the matrix `module`; None = it is not quantised."""
        if not self.by_target:
            return self
        return next((own for target, own in self.by_target if is_meant(module, target)), None)

    def key(self, module: str, end: str) -> str:
        """The name in the files of a tensor of the matrix `module`."""
        return module + dict(self.ends).get(end, f".{end}")
