"""How a checkpoint's embeddings are made: from sentence-transformers' files in a folder, or a GGUF file's keys."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.checkpoints.embedding.dense import PLAIN, Dense, dense_of_folder
from kvloom.checkpoints.embedding.prompts import message_form
from kvloom.checkpoints.families.values import count, flag, short
from kvloom.checkpoints.fields import NO_VALUES, unknown_field
from kvloom.checkpoints.files import read_json, read_object
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.contract.errors import ModelError
from kvloom.contract.pooling import modes_of

LAST = "last"  # default of decoders: only the last token has attended to all others
_PREFIX = "pooling_mode_"
_KEYS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_ORDER = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE; 0 = not said
_OWN = "sentence_transformers."  # begins the names of its classes
_PLAIN_MODULES = ("Transformer", "Pooling", "Normalize", "Dropout")  # embeddings are always normalised
_OF_MODULES = ("idx", "name", "path", "type")
_OF_POOLING = (*(_PREFIX + mode for mode in _ORDER), "pooling_mode", "include_prompt", "embedding_dimension")
_OF_TEXTS = ("max_seq_length", "modality_config", "unpad_inputs", "tokenizer_name_or_path")  # sentence_bert_config.json
_OF_FOLDERS = (  # of config_sentence_transformers.json; vectors have length 1, so all similarities are alike
    *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"),
    *("activation_fn", "keep_in_fp32_modules"),
)
_PLAIN_TEXTS: Mapping[str, tuple[object, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
}
_PLAIN_SCORES: Mapping[str, tuple[object, ...]] = {
    "transformer_task": ("sequence-classification",),
    "module_output_name": ("scores",),
}


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a prompt's states become an embedding, or one number for each label.

    `pooling`: one of pooling.POOLINGS, several with "+" between them, whose vectors follow each other, or a description
    of the model's unsupported pooling. `dense`: the layers that a pooled vector passes through, in order.
    """

    pooling: str
    num_states: int  # numbers of a pooled state
    dense: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()  # of a classifier, whose last layer gives one number for each
    activation: str = ""  # applied to these numbers; see contract.pooling.scores
    num_kept: int | None = None  # numbers of a vector that are given, the first ones; None = all

    @property
    def num_out(self) -> int:
        """Length of a vector."""
        num_out = self.dense[-1].num_out if self.dense else self.num_states
        return num_out if self.num_kept is None else min(self.num_kept, num_out)

    def of(self, pooled: Floats) -> Floats:
        """The vector from a pooled state [num_states]; both float32."""
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled if self.num_kept is None else pooled[: self.num_kept]


def folder_embedding(folder: Path, num_states: int, otherwise: str = LAST) -> Embedding:
    """`num_states`: numbers of a token's state; `otherwise`: the pooling if no file names one.

    Raises ModelError when a file named in modules.json is missing or does not fit.
    """
    modules = _modules(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    known = {*_PLAIN_MODULES, "Dense"}
    extra = [*(kind for kind in kinds if kind not in known), *_of_texts(folder, "SentenceTransformer", _PLAIN_TEXTS)]
    if "Dense" in kinds and (kinds.index("Dense") < kinds.index("Pooling") if "Pooling" in kinds else True):
        extra.append("Dense before the pooling")
    elif "Dense" in kinds and "Normalize" in kinds[: len(kinds) - 1 - kinds[::-1].index("Dense")]:
        extra.append("Dense behind Normalize")
    modes = _pooling(folder, dict(modules), otherwise)
    num_states *= max(1, len(modes_of("+".join(modes))))
    dense: tuple[Dense, ...] = ()
    for kind, path in modules if not extra else ():
        if kind == "Dense":
            dense = (*dense, dense_of_folder(folder / path, dense[-1].num_out if dense else num_states))
        elif kind == "Normalize" and (config := folder / path / "config.json").exists():
            _check(config, (), PLAIN)
    about = _about(folder)
    num_kept = count(about, "truncate_dim") if about.get("truncate_dim") is not None else None
    return Embedding("+".join([*modes, *extra]), num_states, dense, num_kept=num_kept)


def _pooling(folder: Path, paths: Mapping[str, str], otherwise: str) -> list[str]:
    """The modes in the order of their vectors. Raises ModelError."""
    path = folder / paths.get("Pooling", "1_Pooling") / "config.json"
    if "Pooling" not in paths and not path.exists():
        return [otherwise]
    config = _check(path, (*_OF_POOLING, "word_embedding_dimension"))
    named = config.get("pooling_mode") or [mode for mode in _ORDER if flag(config, _PREFIX + mode)]
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(mode, str) for mode in named):
        raise ModelError(f"{path}: pooling_mode must be a name or a list of names, got {short(named)}")
    modes = [_KEYS.get(str(mode), str(mode)) for mode in named] or ["mean"]
    return [*modes, "tokens behind the prompt alone"] if not flag(config, "include_prompt", default=True) else modes


def _of_texts(folder: Path, plain_kind: str, plain: Mapping[str, tuple[object, ...]]) -> list[str]:
    """What sentence-transformers does with texts that is not done here. Raises ModelError."""
    extra = []
    path = folder / "sentence_bert_config.json"
    if path.exists():
        _check(path, _OF_TEXTS, plain)
        if message_form(folder) and plain_kind == "CrossEncoder":
            extra.append("texts as messages of the chat template")
    kind = _about(folder).get("model_type")
    return [*extra, str(kind)[:80]] if kind not in (None, plain_kind) else extra


def _about(folder: Path) -> dict[str, Any]:
    """The folder's own settings. Raises ModelError."""
    path = folder / "config_sentence_transformers.json"
    return _check(path, _OF_FOLDERS) if path.exists() else {}


def _check(path: Path, known: Collection[str], plain: Mapping[str, tuple[object, ...]] = NO_VALUES) -> dict[str, Any]:
    """The object in a file, without unknown fields. Raises ModelError."""
    config = read_object(path)
    name = unknown_field(config, known, plain)
    if name is not None:
        raise ModelError(f"{path}: {name[:80]} is not supported, got {short(config[name])}")
    return config


def longest_text(folder: Path, most: int) -> int:
    """Tokens of the longest text that sentence-transformers gives a model of context `most`. Raises ModelError."""
    path = folder / "sentence_bert_config.json"
    return min(most, count(read_object(path), "max_seq_length", most)) if path.exists() else most


def scoring(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A classifier's configuration with what sentence-transformers 6 writes beside it: how scores are made. Raises
    ModelError for what it does with texts that is not done here.
    """
    kinds = [kind for kind, _ in _modules(folder / "modules.json")]
    extra = [*(kind for kind in kinds if kind != "Transformer"), *_of_texts(folder, "CrossEncoder", _PLAIN_SCORES)]
    if extra:
        raise ModelError(f"{folder}: makes its scores with {', '.join(extra)}, which is not supported")
    named = _about(folder).get("activation_fn")
    return config if named is None else {**config, "sentence_transformers": {"activation_fn": named}}


def gguf_pooling(kind: Any, otherwise: str = LAST) -> str:
    """The pooling for a value of the key <architecture>.pooling_type; None = it is absent."""
    return otherwise if kind in (None, 0) else _GGUF_TYPES.get(kind, f"pooling_type {kind}")


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder) of the modules that a text passes through; empty if the file is absent. Raises ModelError."""
    if not path.exists():
        return []
    try:
        found = [(str(one["type"]), Path(one.get("path") or "").name, dict(one)) for one in read_json(path)]
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a list of modules: {error}") from None
    for kind, _, module in found:
        name = unknown_field(module, _OF_MODULES)
        if name is not None:
            raise ModelError(f"{path}: {name[:80]} of {kind:.80} is not supported, got {short(module[name])}")
    return [(kind.rsplit(".", 1)[-1] if kind.startswith(_OWN) else kind[:80], folder) for kind, folder, _ in found]
