"""open_checkpoint: a GGUF file or a Hugging Face folder -> what a backend needs."""

from dataclasses import dataclass, replace
from pathlib import Path

from kvloom.engine.errors import ModelError
from kvloom.engine.models import family_of
from kvloom.engine.models.spec import DecoderSpec, Rope
from kvloom.engine.weights import gguf as gguf_file
from kvloom.engine.weights import safetensors as folder_file
from kvloom.engine.weights.pooling import folder_pooling, gguf_pooling
from kvloom.engine.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its shape, its tensors, the ids that end a sequence, how its embeddings are pooled."""

    path: Path
    spec: DecoderSpec
    weights: WeightSource
    eos_ids: frozenset[int]
    bos_id: int | None
    pooling: str


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Checks everything but the values. Raises ModelError: unknown architecture, missing, misshapen or cut tensors."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path)
    raise ModelError(f"{path}: no such file or folder")


def _open_folder(folder: Path) -> Checkpoint:
    config = folder_file.read_json(folder / "config.json")
    names = config.get("architectures") or [config.get("model_type", "")]
    if not isinstance(names, list) or not names:
        raise ModelError(f"{folder / 'config.json'}: architectures must be a list of names, got {names!r}")
    family = family_of(str(names[0]), str(folder / "config.json"))
    spec = family.spec(config)
    bos_id = config.get("bos_token_id")
    return Checkpoint(
        folder,
        spec,
        folder_file.SafetensorsSource(folder, spec),
        folder_file.stop_ids(folder, config),
        bos_id if isinstance(bos_id, int) else None,
        folder_pooling(folder),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf_file.GgufFile(path)
    arch, config = gguf_file.config_of(file.header, str(path))
    family = family_of(arch, str(path))
    spec = family.spec(config)
    factors = gguf_file.frequency_factors(file, spec.head_dim)
    if factors:
        freqs = tuple(f / factor for f, factor in zip(spec.rope.inv_freq, factors, strict=True))
        spec = replace(spec, rope=Rope(freqs, spec.rope.attention_factor))
    metadata = file.header.metadata
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return Checkpoint(
        path,
        spec,
        gguf_file.GgufSource(file, spec, family.permuted_gguf),
        frozenset(int(i) for i in ids if i is not None),
        metadata.get("tokenizer.ggml.bos_token_id"),
        gguf_pooling(metadata.get(f"{arch}.pooling_type")),
    )
