"""Prepares a checkpoint for the CPU kernels: weights in panels, and the layer program that runs them."""

import ctypes
import mmap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvloom.checkpoints.families.mixers import Attention, Keyed, LatentAttention, Rope
from kvloom.checkpoints.families.spec import DecoderSpec, Encoder
from kvloom.checkpoints.footprint import STORED, UNQUANTISED_FORM
from kvloom.checkpoints.quantized.forms import number_bits
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.messages import Progress
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.backend import Floats
from kvloom.rank.kernels.cpu_abi import AttentionShape, FileNumbers, Instruction
from kvloom.rank.kernels.cpu_cache import At
from kvloom.rank.kernels.expert_program import declare_experts
from kvloom.rank.kernels.latent_program import declare_latents
from kvloom.rank.kernels.mixer_program import declare_mixer
from kvloom.rank.kernels.program import GATES, Fill, Lent, Native, Program

_NORMS = {"head": cpu_abi.NORM_HEADS, "row": cpu_abi.NORM_ROWS, "rotated": cpu_abi.NORM_ROTATED}


def widest_mlp(spec: DecoderSpec) -> int:
    """Channels of the widest MLP that a token runs through, shared and routed experts included."""
    routed = [spec.experts.intermediate, spec.experts.shared] if spec.experts else []
    dense = [spec.mlp_size(layer) for layer in range(spec.num_layers) if spec.has_dense(layer)]
    return max(routed + dense, default=0)


class Packer:
    """Declares and then fills a checkpoint's linears, and writes the layer program that runs them."""

    def __init__(
        self,
        native: Native,
        spec: DecoderSpec,
        memory: tuple[dict[Rope, int], dict[int, At]],
        weights: WeightSource,
        weight_format: str,
    ) -> None:
        """`memory`: the library's number of each rotary table; where keys and values of each layer are in a block."""
        ropes, self._at = memory
        self._lib, self._model, self._num_threads = native.library, native.model, native.num_threads
        self._spec, self._ropes, self._weights, self._weight_format = spec, ropes, weights, weight_format
        self._program = Program(native, weights, weight_format, spec.gates_mlps)
        self._arenas: list[int] = []  # bytes of each arena
        self.streamed_bytes = 0  # bytes of the linears that a step of one token reads
        self.num_bytes = 0  # and of the embedding
        self.head = cpu_abi.NONE  # the linear that makes logits
        self.embed_linear = cpu_abi.NONE  # whose rows are the embedding, when that is stored as in the file
        self.held: np.ndarray[Any, Any] | None = None  # memory of others that holds the weights
        self.embed = np.empty((0, 0), np.uint16)  # bfloat16; empty when a linear holds the embedding

    @property
    def position_of(self) -> dict[str, tuple[int, int, int]]:
        """name of a matrix -> linear, first channel, interleave."""
        return {fill.name: (fill.linear, fill.first, fill.interleave) for fill in self._program.fills}

    @property
    def program(self) -> list[Instruction]:
        return self._program.instructions

    def describe(self) -> str:
        """How the weights are kept, for people."""
        if self._weight_format != STORED:
            return "in bfloat16" if self._weight_format == "bf16" else f"in {self._weight_format[1]} bits"
        forms = (self._weights.form(name) or UNQUANTISED_FORM for name in self.position_of)
        bits = Counter(number_bits(form) for form in forms)
        told = ", ".join(f"{bits[b]} in {b} bits" for b in sorted(bits))
        return f"as the file has them ({told})"

    def declare(self, lent: Lent | None = None) -> None:
        """Declare every linear in the order of execution, every small vector, and the program. `lent`: of a head that
        guesses, which has no embeddings and no head of its own.
        """
        spec = self._spec
        idle_bytes = self._declare_layers()
        if lent is not None:
            self._share_head(lent)
        elif spec.has_logits:
            self.head = self._program.linear(spec.vocab_size, spec.hidden, (self._head_name, 0))
        if spec.has_logits:
            self._emit_head()
        else:
            norm = cpu_abi.NONE if spec.encoder is not None else self._program.vector("norm")
            self._program.emit(cpu_abi.STATES, vector=norm)
        self.streamed_bytes = sum(self._program.measure()) - idle_bytes
        if lent is None:
            self._declare_embedding()
        self._arenas = self._program.measure()
        self.num_bytes = sum(self._arenas) + self.embed.nbytes

    def _declare_embedding(self) -> None:
        """Keep the embedding as in the file, or as a table."""
        spec = self._spec
        if spec.assists:
            return  # it gets its model's
        if self._weight_format != STORED or not self._weights.form("embed"):
            self.embed = np.empty(spec.tensor_shapes()["embed"], np.uint16)
        elif spec.tie_embeddings:
            self.embed_linear = self.head
        else:
            self.embed_linear = self._program.linear(spec.vocab_size, spec.hidden, ("embed", 0))

    def _declare_layers(self) -> int:
        """All before the head. Returns the bytes of experts that a token does not read."""
        spec, idle_bytes = self._spec, 0
        if spec.joins_states:
            self._declare_join()
        if spec.encoder is not None:
            self._declare_beginning(spec.encoder)
        if spec.layer_inputs is not None:
            self._declare_inputs(spec.layer_inputs.size)
        for layer in range(spec.num_layers):
            self._declare_mixer(layer)
            if spec.encoder is not None and not spec.gates_mlps:
                self._declare_ungated(f"layers.{layer}.")
            elif spec.has_dense(layer):
                idle_bytes += self._declare_mlp(layer)
            elif spec.layers[layer].has_experts:
                idle_bytes += declare_experts(self._program, spec, f"layers.{layer}.")
            if spec.layer_inputs is not None:
                self._declare_input(layer, spec.layer_inputs.size)
        return idle_bytes

    @property
    def _head_name(self) -> str:
        return "embed" if self._spec.tie_embeddings else "head"

    def _share_head(self, lent: Lent) -> None:
        """Compute with the head and the embeddings of another model."""
        self.head = self._program.share_linear(lent.model, lent.head)
        if lent.embed != cpu_abi.NONE:
            is_tied = lent.embed == lent.head
            self.embed_linear = self.head if is_tied else self._program.share_linear(lent.model, lent.embed)

    def _emit_head(self) -> None:
        """Make logits of states."""
        self._program.emit(cpu_abi.ROWS_NORM_QUANT, linear=self.head, vector=self._program.vector("norm"))
        self._program.emit(cpu_abi.LINEAR, linear=self.head, epilogue=cpu_abi.LOGITS)

    def _declare_join(self) -> None:
        """What makes the first layer's input of embeddings and states."""
        program, hidden = self._program, self._spec.hidden
        join = program.linear(hidden, 2 * hidden, ("join", 0))
        norms = {"vector": program.vector("join_embed_norm"), "vector2": program.vector("join_state_norm")}
        program.emit(cpu_abi.JOIN, linear=join, **norms)
        program.emit(cpu_abi.QUANT, linear=join, source=cpu_abi.FROM_QKV)
        program.emit(cpu_abi.LINEAR, linear=join, epilogue=cpu_abi.RESIDUAL)

    def adopt(self, pages: mmap.mmap, progress: Progress | None) -> None:
        """Use `pages`, the concatenated `pieces` of an equal model, instead of calling `fill`."""
        self.held = np.frombuffer(pages, np.uint8)
        self._lib.kvl_adopt(self._model, self.held.ctypes.data)
        arena_bytes = sum(self._arenas)
        self.embed = self.held[arena_bytes:].view(np.uint16).reshape(self.embed.shape)
        first = -(-arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(pages) and hasattr(mmap, "MADV_DONTNEED"):  # a step reads only the rows of its tokens
            pages.madvise(mmap.MADV_DONTNEED, first, len(pages) - first)
        if progress:
            progress(self.num_bytes, self.num_bytes)

    def pieces(self) -> list[memoryview]:
        """The result of `fill`, valid as long as the model: one arena a thread, then the embedding."""
        ranges = [(self._lib.kvl_arena(self._model, thread), size) for thread, size in enumerate(self._arenas)]
        if self.embed.size:
            ranges.append((self.embed.ctypes.data, self.embed.nbytes))
        return [memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B") for address, size in ranges]

    def fill(self, progress: Progress | None) -> None:
        """Read each tensor once, piece by piece, pack it and free it; several tensors at a time."""
        self._lib.kvl_allocate(self._model)
        shapes = self._spec.tensor_shapes()
        if self.embed.size and not self._spec.tie_embeddings:
            for at, values in self._weights.tensor("embed").float32_pieces():
                self._embed_rows(at, values)
        total, done = sum(int(np.prod(shapes[name])) for name in self.position_of), 0
        with ThreadPoolExecutor(self._num_threads) as threads:
            for name in threads.map(self._fill, self._program.fills):
                done += int(np.prod(shapes[name]))
                if progress:
                    progress(self.num_bytes * done // total, self.num_bytes)

    def _declare_mixer(self, layer: int) -> None:
        match self._spec.layers[layer].mixer:
            case None:
                return
            case LatentAttention() as own:
                self._declare_latents(layer, own)
            case Attention():
                self._declare_attention(layer)
            case _:
                self._declare_recurrent(layer)

    def _declare_recurrent(self, layer: int) -> None:
        mixer, at = declare_mixer(self._program, self._spec, layer), f"layers.{layer}."
        self._emit_input(mixer.linear, at + "attn_norm")
        self._program.emit(cpu_abi.LINEAR, linear=mixer.linear, epilogue=cpu_abi.TO_QKV)
        mixer.emit_steps(self._program)
        mixer.emit_quant(self._program)
        self._emit_output(mixer.out, at + "attn_post_norm")

    def _declare_latents(self, layer: int, own: LatentAttention) -> None:
        program, at = self._program, f"layers.{layer}."
        latents = declare_latents(program, own, at, self._spec.hidden, self._at[layer])
        self._emit_input(latents.down, at + "attn_norm")
        latents.emit_steps(program, self._table(own))
        self._emit_output(latents.out, at + "attn_post_norm")

    def _declare_attention(self, layer: int) -> None:
        spec, own, at = self._spec, self._spec.layers[layer].mixer, f"layers.{layer}."
        assert isinstance(own, Attention), "the layer has keys and values"
        projected, number = own.linears(spec.hidden), self._declare_heads(layer, own)
        parts, rows = [], 0
        for part in ("q", "k", "v", "q_gate"):
            if part in projected:
                parts.append((at + part, rows))
                rows += projected[part][0]
        beside = declare_mixer(self._program, spec, layer, parts, rows) if spec.layers[layer].beside else None
        qkv = beside.linear if beside else self._program.linear(rows, spec.hidden, *parts)
        out = self._program.linear(spec.hidden, own.out_size, (at + "o", 0))
        biases = [f"{at}{part}_bias" for part in "qkv" if part in projected]
        bias = self._program.vector(*biases) if spec.qkv_bias else cpu_abi.NONE
        norms = {}
        if spec.qk_norm:
            norms = {
                "vector": self._program.vector(at + "q_norm"),
                "vector2": self._program.vector(at + "k_norm") if "k" in projected else cpu_abi.NONE,
                "source": _NORMS[spec.qk_norm],
            }
        self._emit_input(qkv, at + "attn_norm")
        self._program.emit(cpu_abi.LINEAR, linear=qkv, epilogue=cpu_abi.TO_QKV, vector=bias)
        if beside:
            beside.emit_steps(self._program)
        self._program.emit(cpu_abi.ROPE_KV, layer=number, rope=self._table(own), is_gated=own.is_gated, **norms)
        sinks = self._program.vector(at + "sinks") if spec.has_sinks else cpu_abi.NONE
        window = own.window or 0
        self._program.emit(cpu_abi.ATTENTION, layer=number, window=window, vector=sinks, is_gated=own.is_gated)
        self._program.emit(cpu_abi.QUANT, linear=out, source=cpu_abi.FROM_ATTENTION)
        self._emit_output(
            out, at + "attn_post_norm", self._program.vector(at + "o_bias") if spec.o_bias else cpu_abi.NONE
        )
        if beside:
            beside.emit_quant(self._program)
            self._emit_output(beside.out, at + "attn_post_norm")

    def _table(self, own: Keyed) -> int:
        """The library's number of a mixer's rotary table; NONE = without positions."""
        return cpu_abi.NONE if own.rope is None else self._ropes[own.rope]

    def _declare_heads(self, layer: int, own: Attention) -> int:
        """The library's number of a layer's attention."""
        sizes = own.num_heads, own.num_kv_heads, own.head_dim, own.value_dim
        if own.keys_of is not None:
            return self._program.attention(
                AttentionShape(*sizes, cpu_abi.QUERIES, cpu_abi.NONE, *self._at[own.keys_of][:3])
            )
        norm = cpu_abi.NONE
        if self._spec.norms_values:
            norm = self._program.values(np.ones(own.value_dim, np.float32))
        projected = cpu_abi.KEYS if own.values_are_keys else cpu_abi.ALL
        return self._program.attention(AttentionShape(*sizes, projected, norm, *self._at[layer][:3]))

    def _declare_mlp(self, layer: int) -> int:
        """Gate and up share panels, unless they are stored in different forms. Returns the bytes of experts beside it
        that a token does not read.
        """
        spec, program, at = self._spec, self._program, f"layers.{layer}."
        size, has_experts = spec.mlp_size(layer), spec.layers[layer].has_experts
        program.share(*program.up_names(at))
        gate, is_joint = GATES[spec.activation], program.is_joint(at)
        gate_up = program.gate_up(at, size, spec.hidden, is_joint)
        down = program.linear(spec.hidden, size, (at + "down", 0))
        self._emit_input(gate_up, at + "mlp_norm")
        if is_joint:
            program.emit(cpu_abi.LINEAR, linear=gate_up, epilogue=gate)
            program.emit(cpu_abi.QUANT, linear=down, source=cpu_abi.FROM_MLP)
        else:
            program.emit(cpu_abi.LINEAR, linear=gate_up, epilogue=cpu_abi.TO_QKV)
            program.emit(cpu_abi.QUANT, linear=down, epilogue=gate, source=cpu_abi.FROM_GATE_UP)
        scalar = self._scalar(layer) if spec.layer_inputs is None else cpu_abi.NONE
        if not has_experts:
            self._emit_output(down, at + "mlp_post_norm", scalar=scalar)
            return 0
        program.emit(cpu_abi.LINEAR, linear=down, epilogue=cpu_abi.TO_BRANCH)
        program.emit(cpu_abi.NORM_BRANCH, vector=program.vector(at + "dense_post_norm"))
        idle_bytes = declare_experts(program, spec, at)
        program.emit(cpu_abi.NORM_BRANCH, vector=program.vector(at + "experts_post_norm"), source=1)
        program.emit(cpu_abi.ADD_NORMED, vector=program.vector(at + "mlp_post_norm"), vector2=scalar, source=1)
        return idle_bytes

    def _declare_inputs(self, size: int) -> None:
        """What makes the layers' own inputs of the embeddings, `size` numbers for each layer."""
        spec, program = self._spec, self._program
        mix = program.linear(spec.num_layers * size, spec.hidden, ("layer_mix", 0))
        program.emit(cpu_abi.QUANT, linear=mix, source=cpu_abi.FROM_RESIDUAL)
        program.emit(cpu_abi.LINEAR, linear=mix, epilogue=cpu_abi.TO_INPUTS)
        program.emit(cpu_abi.LAYER_INPUTS, vector=program.vector("layer_mix_norm"), source=size)

    def _declare_input(self, layer: int, size: int) -> None:
        """What adds a layer's own input to the residual stream at its end."""
        spec, program, at = self._spec, self._program, f"layers.{layer}."
        gate = program.linear(size, spec.hidden, (at + "input_gate", 0))
        out = program.linear(spec.hidden, size, (at + "input_out", 0))
        program.emit(cpu_abi.QUANT, linear=gate, source=cpu_abi.FROM_RESIDUAL)
        program.emit(cpu_abi.LINEAR, linear=gate, epilogue=cpu_abi.TO_QKV)
        own = {"source": cpu_abi.FROM_INPUTS, "epilogue": GATES[spec.activation]}
        program.emit(cpu_abi.QUANT, linear=out, layer=layer, **own)
        program.emit(cpu_abi.LINEAR, linear=out, epilogue=cpu_abi.TO_BRANCH)
        norm = program.vector(at + "input_post_norm")
        program.emit(cpu_abi.ADD_NORMED, vector=norm, vector2=self._scalar(layer))

    def _scalar(self, layer: int) -> int:
        """The vector with a layer's scalar."""
        return self._program.vector(f"layers.{layer}.scalar") if self._spec.scales_layers else cpu_abi.NONE

    def _declare_beginning(self, encoder: Encoder) -> None:
        """What is added to the embeddings, and their norm."""
        positions = self._program.vector("positions") if encoder.num_positions else cpu_abi.NONE
        tables = {"vector": positions, "vector2": self._program.vector("types")}
        self._program.emit(cpu_abi.ADD_POSITIONS, source=encoder.first_position, **tables)
        self._emit_layer_norm("embed_norm")

    def _declare_ungated(self, at: str) -> None:
        spec, program = self._spec, self._program
        up = program.linear(spec.intermediate, spec.hidden, (at + "up", 0))
        down = program.linear(spec.hidden, spec.intermediate, (at + "down", 0))
        self._emit_input(up, "")
        program.emit(cpu_abi.LINEAR, linear=up, epilogue=cpu_abi.GELU, vector=program.vector(at + "up_bias"))
        program.emit(cpu_abi.QUANT, linear=down, source=cpu_abi.FROM_MLP)
        self._emit_output(down, at + "mlp_post_norm", program.vector(at + "down_bias"))

    def _emit_layer_norm(self, name: str) -> None:
        weight, bias = self._program.vector(name), self._program.vector(name + "_bias")
        self._program.emit(cpu_abi.LAYER_NORM, vector=weight, vector2=bias)

    def _emit_input(self, linear: int, norm: str) -> None:
        """Quantise the residual stream for `linear`, after the norm if the model has one before a branch."""
        if self._spec.norms in ("post", "sum"):
            self._program.emit(cpu_abi.QUANT, linear=linear, source=cpu_abi.FROM_RESIDUAL)
        else:
            self._program.emit(cpu_abi.NORM_QUANT, linear=linear, vector=self._program.vector(norm))

    def _emit_output(self, linear: int, norm: str, bias: int = cpu_abi.NONE, scalar: int = cpu_abi.NONE) -> None:
        """Run the last linear of a branch, and add its result to the residual stream, after the norm if the model has
        one behind a branch; then multiply the stream by `scalar`.
        """
        assert scalar == cpu_abi.NONE or self._spec.norms in ("post", "both"), "a norm scales the stream"
        if self._spec.norms in ("pre", "sum"):
            self._program.emit(cpu_abi.LINEAR, linear=linear, epilogue=cpu_abi.RESIDUAL, vector=bias)
            if self._spec.norms == "sum":
                self._emit_layer_norm(norm)
        else:
            self._program.emit(cpu_abi.LINEAR, linear=linear, epilogue=cpu_abi.TO_BRANCH, vector=bias)
            self._program.emit(cpu_abi.ADD_NORMED, vector=self._program.vector(norm), vector2=scalar)

    def _fill(self, fill: Fill) -> str:
        """Read and pack one tensor. Runs in a pool's thread; decoding and packing release the interpreter lock. Returns
        its name.
        """
        linear, name, first, interleave = fill.linear, fill.name, fill.first, fill.interleave
        raw = self._weights.tensor(name)
        if self._program.keeps(name, raw.form):
            for at, part in raw.number_pieces():
                arrays = part.values, part.scales, part.minimums, *(part.factors or (None, None))
                own = [None if array is None else np.ascontiguousarray(array) for array in arrays]
                starts = [None if array is None else array.ctypes.data for array in own]
                numbers = FileNumbers(*starts[:3], part.run, *starts[3:])
                count, channel = len(part.values), first + at
                self._lib.kvl_fill_numbers(self._model, linear, ctypes.byref(numbers), count, channel, interleave)
            return name
        for at, values in raw.float32_pieces():
            # the head of a model that ties embedding and head: read once for both
            if name == "embed" and self.embed.size:
                self._embed_rows(at, values)
            self._lib.kvl_fill_f32(self._model, linear, values.ctypes.data, len(values), first + at, interleave)
        return name

    def _embed_rows(self, first: int, values: Floats) -> None:
        rows = self.embed[first : first + len(values)]
        self._lib.kvl_round_bf16(values.ctypes.data, values.size, rows.ctypes.data)
