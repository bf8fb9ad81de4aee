"""Guess heads: the layer of a model's own files that guesses the token after the next one (multi-token prediction).

Of a token and the state that the model has of the token before, behind its last norm, it makes logits as one more
layer of attention would, with the model's own embeddings and head (DeepSeek-AI 2024, section 2.2). Folders hold it as
`mtp`, GGUF files as the layer behind the last, with `nextn` tensors.
"""

import re
from dataclasses import replace

from kvloom.checkpoints import gguf as gguf_file
from kvloom.checkpoints import safetensors as folder_file
from kvloom.checkpoints.checkpoint import Checkpoint
from kvloom.checkpoints.families import family_of, text_architecture
from kvloom.checkpoints.families.adapted import adapted, file_shapes, folder_layout, gguf_layout
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.mixers import Attention
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.files import MAX_CONFIG_BYTES, read_object
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.checkpoints.source import CheckedWeights, WeightSource
from kvloom.contract.errors import ModelError

_FOLDER_NAMES = {
    "layers": "mtp.layers",
    "norm": "mtp.norm.weight",
    "join": "mtp.fc.weight",
    "join_embed_norm": "mtp.pre_fc_norm_embedding.weight",
    "join_state_norm": "mtp.pre_fc_norm_hidden.weight",
}
_GGUF_NAMES = {
    "norm": "nextn.shared_head_norm.weight",
    "join": "nextn.eh_proj.weight",
    "join_embed_norm": "nextn.enorm.weight",
    "join_state_norm": "nextn.hnorm.weight",
}
_OWN_TABLES = re.compile(r"mtp\.(embed_tokens|lm_head|shared_head)\..*|.*\.nextn\.(embed_tokens|shared_head_head)\..*")


def open_guess_head(model: Checkpoint) -> Checkpoint:
    """The guess head of a model's files. Raises ModelError: they have none, or one that is not known."""
    spec, weights = _of_folder(model) if model.path.is_dir() else _of_gguf(model)
    return replace(model, spec=spec, weights=CheckedWeights(weights, model.path), unread=())


def _of_folder(model: Checkpoint) -> tuple[DecoderSpec, WeightSource]:
    folder = model.path
    config = read_object(folder / "config.json", MAX_CONFIG_BYTES)
    scheme = scheme_of(config, str(folder / "config.json"))
    names = config.get("architectures") or [config.get("model_type", "")]
    family = family_of(text_architecture(str(names[0]), config), str(folder / "config.json"))
    own = [name for name in folder_file.tensor_names(folder) if name.startswith("mtp.")]
    spec = _spec(model, family, own, {name.split(".")[2] for name in own if name.startswith("mtp.layers.")})
    layout = folder_layout(family, scheme, own, config)
    keys = {**family.names, **_FOLDER_NAMES}
    return spec, adapted(folder_file.SafetensorsSource(folder, file_shapes(layout, spec), keys, scheme), layout, spec)


def _of_gguf(model: Checkpoint) -> tuple[DecoderSpec, WeightSource]:
    file = gguf_file.GgufFile(model.path)
    arch, _ = gguf_file.config_of(file.header, str(model.path))
    family, at = family_of(arch, str(model.path)), f"blk.{model.spec.num_layers}"
    own = [name for name in file.header.tensors if ".nextn." in name]
    spec = _spec(model, family, own, {name.split(".")[1] for name in own})
    has_sections = f"{arch}.rope.dimension_sections" in file.header.metadata
    layout = gguf_layout(family, has_sections, gguf_file.stacking_of(file.header))
    keys = {**family.gguf_names, "layers": at, **{name: f"{at}.{key}" for name, key in _GGUF_NAMES.items()}}
    if keys["norm"] not in file.header.tensors:
        keys["norm"] = gguf_file.TOP_NAMES["norm"]
    return spec, adapted(gguf_file.GgufSource(file, file_shapes(layout, spec), keys), layout, spec)


def _spec(model: Checkpoint, family: Family, names: list[str], layers: set[str]) -> DecoderSpec:
    """Of a head whose tensors are `names`, in `layers`: a layer with attention as the model has them."""
    if not family.has_guess_head:
        raise ModelError(f"heads of {family.name} that guess tokens are not supported")
    if not names:
        raise ModelError("these files have no head that guesses tokens (mtp, nextn)")
    if len(layers) != 1:
        raise ModelError(f"a head of {len(layers)} layers that guess tokens; one is supported")
    if tables := [name for name in names if _OWN_TABLES.fullmatch(name)]:
        raise ModelError(f"tensor {tables[0]}: a head that guesses with a vocabulary of its own is not supported")
    layer = next((layer for layer in model.spec.layers if isinstance(layer.mixer, Attention)), None)
    if layer is None:
        raise ModelError("no layer has attention, of which a head that guesses has one")
    return replace(model.spec, layers=(layer,), joins_states=True)
