"""A mixture of experts on the CPU kernels: the rate of reading one token's experts, relative to the memory's rate.

`python -m benches.kernels.experts [--kinds q4_k_m] [--layers 4] [--experts 64] [--rounds 7]` makes a random model of
OLMoE's shape (1B of 7B weights work on a token with 16 layers; fewer layers are the same a layer), nothing is fetched
or written, and prints JSON lines: memory, then the points of `kvloom bench --level kernels`. `limit_tok_s` counts the
experts that one token chooses; tokens of a batch choose others, so the share is meaningless for decode_8 and decode_32.
"""

import argparse
import json

from benches.kernels.formats import RandomFile, q4_k_m, random_rows
from kvloom.bench.kernels import measure
from kvloom.checkpoints.families.mixers import Attention, Rope
from kvloom.checkpoints.families.spec import DecoderSpec, Experts, Layer
from kvloom.checkpoints.quantized.blocks import KINDS
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM, VOCAB, PER_TOKEN = 2048, 1024, 16, 128, 50_304, 8


def olmoe(num_layers: int, num_experts: int) -> DecoderSpec:
    rope = Rope(tuple(float(10_000.0 ** (-2 * i / HEAD_DIM)) for i in range(HEAD_DIM // 2)))
    layers = (Layer(Attention(HEADS, HEADS, HEAD_DIM, rope), has_experts=True),) * num_layers
    sizes = (HIDDEN, INTERMEDIATE, VOCAB)
    experts = Experts(num_experts, PER_TOKEN, INTERMEDIATE, weighs_chosen=False)
    return DecoderSpec("olmoe", *sizes, 4096, layers, 1e-5, tie_embeddings=True, experts=experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="q4_k_m", choices=["q4_k_m", *KINDS])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    spec = olmoe(args.layers, args.experts)
    weights = RandomFile(spec, q4_k_m(args.layers) if args.kinds == "q4_k_m" else lambda name: args.kinds)
    backend = CpuBackend(spec, weights, 512, CpuOptions("stored", isa=args.isa))
    random_rows.cache_clear()
    common = {"bench": "experts", "kinds": args.kinds, "isa": backend.isa, "layers": args.layers}
    sizes = {"file_mb": round(weights.num_bytes / 1e6, 1), "memory_mb": round(backend.weight_bytes / 1e6, 1)}
    active = round(backend.streamed_bytes / 1e6, 1)
    print(json.dumps({**common, "name": "memory", **sizes, "active_mb": active}), flush=True)
    for row in measure(backend, args.rounds, lambda done: None):
        print(json.dumps(common | row), flush=True)


if __name__ == "__main__":
    main()
