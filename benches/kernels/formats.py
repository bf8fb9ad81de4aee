"""A quantised file kept as it is: its size in memory, and the rate of reading it, relative to the memory's rate.

`python -m benches.kernels.formats [--kinds q4_k_m] [--layers 16] [--rounds 7]` makes a random Llama of the 1.2B one's
shape (nothing is fetched or written), its tensors of the kinds that llama.cpp gives a Q4_K_M file, or all of one kind,
and prints JSON lines: memory to the size of the file, then the points of `kvloom bench --level kernels`.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache

import gguf
import numpy as np

from kvloom.bench.kernels import measure
from kvloom.checkpoints.families.mixers import Attention, Rope
from kvloom.checkpoints.families.spec import DecoderSpec, Layer
from kvloom.checkpoints.quantized.blocks import KINDS, form_of
from kvloom.checkpoints.source import RawTensor, Tensor, as_rows
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 32, 8, 64, 128_256
KindOf = Callable[[str], str]
_SCALES_AT = {"q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "mxfp4": ()}  # float16s


def llama(num_layers: int) -> DecoderSpec:
    rope = Rope(tuple(float(500_000.0 ** (-2 * i / HEAD_DIM)) for i in range(HEAD_DIM // 2)))
    sizes = (HIDDEN, INTERMEDIATE, VOCAB)
    layers = (Layer(Attention(HEADS, KV_HEADS, HEAD_DIM, rope)),) * num_layers
    return DecoderSpec("llama", *sizes, 8192, layers, 1e-5, tie_embeddings=True)


def q4_k_m(num_layers: int) -> KindOf:
    """As llama.cpp's llama_tensor_get_type: the embedding, and v and down of half of the layers, in 6 bits."""

    def kind(name: str) -> str:
        if name == "embed":
            return "q6_k"
        _, index, *_, part = name.split(".")
        at, eighth = int(index), num_layers // 8
        has_more = at < eighth or at >= 7 * num_layers // 8 or (at - eighth) % 3 == 2
        return "q6_k" if part in ("v", "down") and has_more else "q4_k"

    return kind


class RandomFile:
    """A WeightSource of random values; matrices of the same shape and kind share one array."""

    def __init__(self, spec: DecoderSpec, kind_of: KindOf) -> None:
        self._shapes, self._kind_of = spec.tensor_shapes(), kind_of

    def names(self) -> list[str]:
        return list(self._shapes)

    def form(self, name: str) -> str:
        return form_of(self._kind_of(name)) if self._is_matrix(name) else ""

    def _is_matrix(self, name: str) -> bool:
        return len(self._shapes[name]) == 2 and not name.endswith("router")  # files hold routers in float32

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if not self._is_matrix(name):
            values = (
                np.random.default_rng(0).standard_normal(shape, np.float32) / 8 if len(shape) > 1 else np.ones(shape)
            )
            return RawTensor(name, shape, "f32", as_rows(values.astype(np.float32).view(np.uint8).reshape(-1), shape))
        return RawTensor(name, shape, self._kind_of(name), random_rows(shape, self._kind_of(name)))

    @property
    def num_bytes(self) -> int:
        """The size of the file's matrices."""
        matrices = ((shape, self._kind_of(name)) for name, shape in self._shapes.items() if self._is_matrix(name))
        return sum(shape[0] * row_bytes(shape[1], kind) for shape, kind in matrices)


def row_bytes(cols: int, kind: str) -> int:
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    return cols // num_values * num_bytes


@cache
def random_rows(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Random bytes, with scales that keep sums finite."""
    rows = np.random.default_rng(0).integers(0, 256, (shape[0], row_bytes(shape[1], kind)), np.uint8)
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1])
    for at in _SCALES_AT.get(kind, (0,)):
        blocks[:, at : at + 2] = np.array([2.0**-12], np.float16).view(np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = 118
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="q4_k_m", choices=["q4_k_m", *KINDS])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    spec = llama(args.layers)
    kind_of = q4_k_m(args.layers) if args.kinds == "q4_k_m" else lambda name: args.kinds
    weights = RandomFile(spec, kind_of)
    backend = CpuBackend(spec, weights, 512, CpuOptions("stored", isa=args.isa))
    random_rows.cache_clear()
    common = {"bench": "formats", "kinds": args.kinds, "isa": backend.isa}
    sizes = {"file_mb": round(weights.num_bytes / 1e6, 1), "memory_mb": round(backend.weight_bytes / 1e6, 1)}
    ratio = round(backend.weight_bytes / weights.num_bytes, 3)
    print(json.dumps({**common, "name": "memory", **sizes, "ratio": ratio, "held": backend.held_as}), flush=True)
    for row in measure(backend, args.rounds, lambda done: None):
        print(json.dumps(common | row), flush=True)


if __name__ == "__main__":
    main()
