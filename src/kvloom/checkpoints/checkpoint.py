"""open_checkpoint: reads from a GGUF file or a Hugging Face folder what a backend needs."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvloom.checkpoints import gguf as gguf_file
from kvloom.checkpoints import safetensors as folder_file
from kvloom.checkpoints.embedding.classes import decoder_classes, encoder_classes
from kvloom.checkpoints.embedding.dense import dense_of_gguf
from kvloom.checkpoints.embedding.pooling import LAST, Embedding, folder_embedding, gguf_pooling, longest_text, scoring
from kvloom.checkpoints.families import CLASSIFIER, family_of, has_head, text_architecture
from kvloom.checkpoints.families.adapted import adapted, file_shapes, folder_layout, gguf_layout
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.files import MAX_CONFIG_BYTES, read_object
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.fingerprint import Stamp, stamp
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.checkpoints.source import CheckedWeights, WeightSource, naming
from kvloom.checkpoints.unread import left_out
from kvloom.contract.errors import ModelError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its shape, its tensors, and how its embeddings are made."""

    path: Path
    spec: DecoderSpec
    weights: WeightSource
    embedding: Embedding
    unread: tuple[str, ...] = ()  # names of tensors that nothing reads
    stamp: Stamp = field(default_factory=list)  # stamp of the files before they were opened
    draft: "Checkpoint | None" = None  # a smaller model that guesses for it


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Checks everything except the values. Raises ModelError: unknown architecture; missing, misshapen, cut tensors."""
    path = find_weights(Path(path))
    try:
        with naming(path):
            before = stamp(str(path))
            if path.is_dir():
                return replace(_open_folder(path), stamp=before)
            if path.is_file():
                return replace(_open_gguf(path), stamp=before)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path}: holds what no model holds: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise ModelError(f"{path}: no such file or folder")


def _open_folder(folder: Path) -> Checkpoint:
    config = read_object(folder / "config.json", MAX_CONFIG_BYTES)
    scheme = scheme_of(config, str(folder / "config.json"))
    names = config.get("architectures") or [config.get("model_type", "")]
    if not isinstance(names, list) or not names:
        raise ModelError(f"{folder / 'config.json'}: architectures must be a list of names, got {names!r:.80}")
    name = text_architecture(str(names[0]), config)
    family = family_of(name, str(folder / "config.json"))
    spec = family.spec(config)
    spec = spec if has_head(name) else spec.without_head()
    if not spec.has_logits:
        spec = replace(spec, max_seq_len=longest_text(folder, spec.max_seq_len))
    layout = folder_layout(family, scheme, folder_file.tensor_names(folder), config)
    source = folder_file.SafetensorsSource(folder, file_shapes(layout, spec), family.names, scheme)
    if spec.tie_embeddings and source.has_own_head():  # as transformers does since 5.23
        spec = replace(spec, tie_embeddings=False)
        source = folder_file.SafetensorsSource(folder, file_shapes(layout, spec), family.names, scheme)
    if name.endswith(CLASSIFIER) and spec.encoder is not None:
        embedding = encoder_classes(scoring(folder, config), source, spec.hidden, family.name)
    elif name.endswith(CLASSIFIER):
        embedding = decoder_classes(scoring(folder, config), source, spec.hidden)
    else:
        embedding = folder_embedding(folder, spec.hidden, _otherwise(spec))
    return Checkpoint(
        folder,
        spec,
        CheckedWeights(adapted(source, layout, spec), folder),
        embedding,
        left_out(source.unread(), config, spec),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf_file.GgufFile(path)
    arch, config = gguf_file.config_of(file.header, str(path))
    family = family_of(arch, str(path))
    config["rope_scaling"] |= gguf_file.rope_factors(file)
    spec = family.spec(config)
    metadata = file.header.metadata
    has_sections = f"{arch}.rope.dimension_sections" in metadata
    stacking, has_kv_up = gguf_file.stacking_of(file.header), gguf_file.has_kv_up(file.header)
    layout = gguf_layout(family, has_sections, stacking, has_kv_up)
    source = gguf_file.GgufSource(file, file_shapes(layout, spec), family.gguf_names)
    return Checkpoint(
        path,
        spec,
        CheckedWeights(adapted(source, layout, spec), path),
        Embedding(
            gguf_pooling(metadata.get(f"{arch}.pooling_type"), _otherwise(spec)),
            spec.hidden,
            dense_of_gguf(file, spec.hidden),
        ),
        left_out(source.unread(), config, spec),
    )


def _otherwise(spec: DecoderSpec) -> str:
    """The pooling of states if the files do not name one."""
    return "mean" if spec.sees_ahead else LAST
