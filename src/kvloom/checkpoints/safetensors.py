"""Hugging Face folders: config.json and safetensors, one file or many."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.mapped import MappedFile
from kvloom.checkpoints.quantized.codebook import PARTS, Codebook, codebook
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.numbers import Bytes, Floats
from kvloom.checkpoints.quantized.packed import PackedMatrix, Part, check_parts, check_sizes, marks, wanted
from kvloom.checkpoints.quantized.torchao import PRE_SCALE
from kvloom.checkpoints.source import RawTensor, Tensor, as_rows, check_shape, has_sizes, widen
from kvloom.checkpoints.tensorfile import FLOATS, LENGTH_BYTES, Damaged, Entry, header_bytes, read_entries
from kvloom.checkpoints.unread import is_harmless
from kvloom.contract.errors import ModelError

_PREFIX = "model."
# as sentence-transformers saves a decoder: ""; as models that read pictures too hold theirs; encoders; Mamba's kin
_PREFIXES = (
    *(_PREFIX, "", "language_model.model.", "model.language_model."),
    *("bert.", "roberta.", "nomic_bert.", "backbone."),
)
TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_down": "self_attn.q_a_proj.weight",
    "q_down_norm": "self_attn.q_a_layernorm.weight",
    "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_down_norm": "self_attn.kv_a_layernorm.weight",
    "kv_up": "self_attn.kv_b_proj.weight",
    "qkv": "self_attn.qkv_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
    "o_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "q_gated": "self_attn.q_proj.weight",
    "conv_in": "linear_attn.in_proj_qkv.weight",
    "gate_in": "linear_attn.in_proj_z.weight",
    "beta_in": "linear_attn.in_proj_b.weight",
    "decay_in": "linear_attn.in_proj_a.weight",
    "short_in": "conv.in_proj.weight",
    "qkvz": "linear_attn.in_proj_qkvz.weight",
    "ba": "linear_attn.in_proj_ba.weight",
    "conv": "linear_attn.conv1d.weight",
    "decay": "linear_attn.A_log",
    "decay_bias": "linear_attn.dt_bias",
    "out_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.router.bias",
    "experts.gate": "mlp.experts.{}.gate_proj.weight",
    "experts.up": "mlp.experts.{}.up_proj.weight",
    "experts.down": "mlp.experts.{}.down_proj.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
    "gate_up_experts": "mlp.experts.gate_up_proj",
    "down_experts": "mlp.experts.down_proj",
    "gate_up_experts_bias": "mlp.experts.gate_up_proj_bias",
    "down_experts_bias": "mlp.experts.down_proj_bias",
    "gate_up_experts_blocks": "mlp.experts.gate_up_proj_blocks",
    "down_experts_blocks": "mlp.experts.down_proj_blocks",
    "gate_up_experts_scales": "mlp.experts.gate_up_proj_scales",
    "down_experts_scales": "mlp.experts.down_proj_scales",
}
_BYTES = ("_blocks", "_scales")  # tensors of MXFP4
_INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 8 << 20
_NO_NAMES: Mapping[str, str] = {}


def file_name(name: str, own: Mapping[str, str] = _NO_NAMES) -> str:
    """A Hugging Face checkpoint's name of a canonical tensor.

    `own`: names that differ, by their names in a layer, or "layers" for the prefix before its number.
    """
    if "." not in name:
        return own.get(name) or TOP_NAMES[name]
    _, index, part = name.split(".", 2)
    expert = ""
    if part.startswith("experts."):
        _, expert, part = part.split(".")
        part = f"experts.{part}"
    return f"{own.get('layers', 'model.layers')}.{index}.{(own.get(part) or LAYER_NAMES[part]).format(expert)}"


def tensor_names(folder: Path) -> list[str]:
    """Names of the tensors of a folder's files. Raises ModelError."""
    return [key for path in _weight_files(folder) for key in _entries(path, MappedFile(path))]


class SafetensorsSource:
    """Maps the files of a folder; the existence and shape of every tensor of `shapes` is checked on opening."""

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        names: Mapping[str, str] = _NO_NAMES,
        scheme: Scheme | None = None,
    ) -> None:
        """shapes: adapted.file_shapes; names: of a layer's tensors, where they are not LAYER_NAMES; scheme: how
        matrices are packed, those that are.
        """
        self._folder, self._shapes, self._names = folder, shapes, names
        self._packed: dict[str, PackedMatrix | Codebook] = {}  # their bytes are not read yet
        self._tensors: dict[str, tuple[Path, MappedFile, Entry]] = {}  # by name in the files
        for path in _weight_files(folder):
            file = MappedFile(path)
            for key, entry in _entries(path, file).items():
                if key in self._tensors and not (folder / _INDEX).exists():  # nobody says which of them is meant
                    raise ModelError(f"{path}: tensor {key} is in {self._tensors[key][0].name} too")
                self._tensors[key] = path, file, entry
        self._read: set[str] = set()  # names in the files
        bare = file_name("embed", names).removeprefix(_PREFIX)
        self._prefix = next((prefix for prefix in _PREFIXES if prefix + bare in self._tensors), _PREFIX)
        kinds = {key: entry.kind for key, (_, _, entry) in self._tensors.items()}
        for name, shape in self._shapes.items():
            key = self._key(name)
            module = key.removesuffix(".weight")
            own = scheme.of(module) if scheme is not None else None
            if own is not None and marks(own, kinds, module):
                if len(shape) > 2:
                    problem = f"{module} is quantised and holds all experts of its layer"
                    raise ModelError(f"{folder}: {problem}; quantised experts need tensors of their own, or GGUF")
                if len(shape) == 2:
                    self._packed[name] = self._open_packed(own, name, folder)
                    continue
            is_linear = len(shape) == 2 and name != "embed"
            if own and is_linear and any(one.applies(module) for one in own.rotations):
                raise ModelError(f"{folder}: tensor {key} is rotated and not quantised, which is not supported")
            self._check(key, shape, ("U8",) if name.endswith(_BYTES) else FLOATS)

    def names(self) -> list[str]:
        return list(self._shapes)

    def _key(self, name: str) -> str:
        """The tensor's name in these files."""
        key = file_name(name, self._names)
        if name == "head" and key not in self._tensors:
            key = self._prefix.removesuffix(_PREFIX) + key  # "language_model.lm_head.weight"
        key = self._prefix + key.removeprefix(_PREFIX) if key.startswith(_PREFIX) else key
        other = key.replace(".mlp.", ".block_sparse_moe.")  # as transformers saves Kimi-Linear's dense layers
        return other if key not in self._tensors and other in self._tensors else key

    def has_own_head(self) -> bool:
        """Whether the files hold a head whose values are not the embedding's."""
        head, embed = (self._tensors.get(self._key(name)) for name in ("head", "embed"))
        if head is None or embed is None:
            return False
        self._read.add(self._key("head"))
        (_, of_head, one), (_, of_embed, other) = head, embed
        if (one.kind, one.shape) != (other.kind, other.shape):
            return True
        starts = range(0, one.end - one.start, _PIECE_BYTES)
        ends = (min(at + _PIECE_BYTES, one.end - one.start) for at in starts)
        return not all(
            np.array_equal(
                of_head.part(one.start + at, one.start + end), of_embed.part(other.start + at, other.start + end)
            )
            for at, end in zip(starts, ends, strict=True)
        )

    def unread(self) -> list[str]:
        """Names of the files' tensors that nothing has asked for, and that might change what is computed."""
        return [
            key for key in self._tensors if key not in self._read and not is_harmless(key) and not self._is_zero(key)
        ]

    def _is_zero(self, key: str) -> bool:
        """Whether it is a bias that adds nothing, as GPTQ's tools write for every matrix."""
        _, file, entry = self._tensors[key]
        return key.endswith(".bias") and not file.part(entry.start, entry.end).any()

    def _check(self, key: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
        """Raises ModelError when the files' tensor `key` is missing, or of another shape or type."""
        if key not in self._tensors:
            raise ModelError(f"{self._folder}: tensor {key} is missing")
        self._read.add(key)
        path, _, entry = self._tensors[key]
        # Ernie's correction of scores, weights of convolutions and Kimi's decays have dimensions of 1
        check_shape(key, shape if has_sizes(entry.shape, shape) else entry.shape, shape, str(path))
        if entry.kind not in kinds:
            known = "known are F32, F16 and BF16" if kinds == FLOATS else f"known is {kinds[0]}"
            raise ModelError(f"{path}: tensor {key} is {entry.kind:.80}; {known}")

    def floats(self, key: str, shape: tuple[int, ...]) -> Floats:
        """A tensor that is not in the spec, by its name in the files, as float32. Raises ModelError."""
        self._check(key, shape, FLOATS)
        _, file, entry = self._tensors[key]
        return widen(file.part(entry.start, entry.end), entry.kind.lower()).reshape(shape)

    def _open_packed(self, scheme: Scheme, name: str, folder: Path) -> PackedMatrix | Codebook:
        """Open a quantised matrix. Raises ModelError when one of its tensors is missing, or of wrong type or shape."""
        base, shape = self._key(name).removesuffix(".weight"), self._shapes[name]
        if scheme.layout == "codebook":
            return codebook(name, shape, self._bytes_of(base), f"{folder}: tensor {base}")
        check_sizes(scheme, f"{folder}: tensor {base}", shape)
        if base + PRE_SCALE in self._tensors:
            raise ModelError(f"{folder}: tensor {base}{PRE_SCALE} is a factor of activations, which is not supported")
        parts = {}
        for end, want in wanted(scheme, shape).items():
            key = scheme.key(base, end)
            if key not in self._tensors and want.other:
                key = f"{base}.{want.other}"
            if key not in self._tensors:
                if want.is_optional:
                    continue
                raise ModelError(f"{folder}: tensor {scheme.key(base, end)} is missing")
            self._read.add(key)
            path, file, entry = self._tensors[key]
            if entry.shape not in want.shapes:
                check_shape(key, entry.shape, want.shapes[0], str(path))
            if entry.kind not in want.kinds:
                raise ModelError(f"{path}: tensor {key} is {entry.kind:.80}; known are {', '.join(want.kinds)}")
            parts[end] = Part(entry.kind, entry.shape, file.part(entry.start, entry.end))
        check_parts(parts, f"{folder}: tensor {base}")
        rotations = [one for one in scheme.rotations if one.applies(base)]
        if len(rotations) > 1:
            raise ModelError(f"{folder}: tensor {base} is rotated twice, which is not supported")
        self._read.update(f"{base}.{one.name}_input.weight" for one in rotations)
        sizes = [one.size_of(base, shape[1]) for one in rotations]
        return PackedMatrix(name, shape, scheme, parts, *sizes)

    def _bytes_of(self, base: str) -> dict[str, Bytes]:
        """The bytes of the tensors of bitsandbytes' matrix `base`, by the ends of their names."""
        found = {}
        for end in PARTS:
            if f"{base}.{end}" in self._tensors:
                self._read.add(f"{base}.{end}")
                _, file, entry = self._tensors[f"{base}.{end}"]
                found[end] = file.part(entry.start, entry.end)
        return found

    def form(self, name: str) -> str:
        return self._packed[name].form if name in self._packed else ""

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        if name in self._packed:
            return self._packed[name]
        _, file, entry = self._tensors[self._key(name)]
        data = as_rows(file.part(entry.start, entry.end), self._shapes[name])
        return RawTensor(name, self._shapes[name], entry.kind.lower(), data)


def _entries(path: Path, file: MappedFile) -> dict[str, Entry]:
    """Raises ModelError."""
    try:
        size = header_bytes(file.part(0, LENGTH_BYTES).tobytes())
        entries = read_entries(file.part(0, size).tobytes())
        end = max((entry.end for entry in entries.values()), default=size)
        if end != file.num_bytes:
            raise Damaged(f"it has {file.num_bytes} bytes, its header says {end}")
    except Damaged as error:
        about = f"tensor {error.tensor[:200]} " if error.tensor else ""
        raise ModelError(f"{path}: damaged or cut short: {about}{error}") from None
    return entries


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to files")
        files = sorted({folder / Path(f).name for f in weight_map.values()})
    else:
        whole = folder / "model.safetensors"  # read alone, as transformers does: others are variants of it
        files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files and (any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))):
        raise ModelError(f"{folder}: holds only pickle weights (.bin), which are never opened; convert to safetensors")
    if not files:
        raise ModelError(f"{folder}: holds no .safetensors file")
    for path in files:
        if not path.exists() and index.exists():
            raise ModelError(f"{path}: no such file, though {index.name} names it")
    return files
