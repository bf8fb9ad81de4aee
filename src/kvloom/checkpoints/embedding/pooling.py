"""How a checkpoint's embeddings are made: from sentence-transformers' files in a folder, or a GGUF file's keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.checkpoints.embedding.dense import Dense, dense_of_folder
from kvloom.checkpoints.files import read_json, read_object
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.contract.errors import ModelError

LAST = "last"  # default of decoders: only the last token has attended to all others
_PREFIX = "pooling_mode_"
_KEYS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE; 0 = not said
_PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")  # embeddings are always normalised


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a prompt's states become an embedding, or one number for each label.

    `pooling`: one of pooling.POOLINGS, or a description of the model's unsupported pooling. `dense`: the layers that a
    pooled vector passes through, in order.
    """

    pooling: str
    num_states: int  # numbers of a token's state
    dense: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()  # of a classifier, whose last layer gives one number for each
    activation: str = ""  # applied to these numbers; see contract.pooling.scores

    @property
    def num_out(self) -> int:
        """Length of a vector."""
        return self.dense[-1].num_out if self.dense else self.num_states

    def of(self, pooled: Floats) -> Floats:
        """The vector from a pooled state [num_states]; both float32."""
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled


def folder_embedding(folder: Path, num_states: int, otherwise: str = LAST) -> Embedding:
    """`num_states`: numbers of a token's state; `otherwise`: the pooling if no file names one.

    Raises ModelError when a file named in modules.json is missing or does not fit.
    """
    modules = _modules(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    known = {*_PLAIN_MODULES, "Dense"}
    extra = [kind for kind in kinds if kind not in known]
    if "Dense" in kinds and (kinds.index("Dense") < kinds.index("Pooling") if "Pooling" in kinds else True):
        extra.append("Dense before the pooling")
    elif "Dense" in kinds and "Normalize" in kinds[: len(kinds) - 1 - kinds[::-1].index("Dense")]:
        extra.append("Dense behind Normalize")
    pooling = "+".join([_pooling(folder, dict(modules), otherwise), *extra])
    dense: tuple[Dense, ...] = ()
    for kind, path in modules if not extra else ():
        if kind == "Dense":
            dense = (*dense, dense_of_folder(folder / path, dense[-1].num_out if dense else num_states))
    return Embedding(pooling, num_states, dense)


def _pooling(folder: Path, paths: Mapping[str, str], otherwise: str) -> str:
    """Raises ModelError."""
    path = folder / paths.get("Pooling", "1_Pooling") / "config.json"
    if "Pooling" not in paths and not path.exists():
        return otherwise
    config = read_object(path)
    modes = [key.removeprefix(_PREFIX) for key, value in config.items() if key.startswith(_PREFIX) and value]
    if isinstance(config.get("pooling_mode"), str):
        modes.append(config["pooling_mode"])
    if config.get("include_prompt") is False:
        modes.append("tokens behind the prompt alone")
    return "+".join(_KEYS.get(mode, mode) for mode in modes) or otherwise


def gguf_pooling(kind: Any, otherwise: str = LAST) -> str:
    """The pooling for a value of the key <architecture>.pooling_type; None = it is absent."""
    return otherwise if kind in (None, 0) else _GGUF_TYPES.get(kind, f"pooling_type {kind}")


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder) of the modules that a text passes through; empty if the file is absent. Raises ModelError."""
    if not path.exists():
        return []
    try:
        return [(str(one["type"]).rsplit(".", 1)[-1], Path(one.get("path") or "").name) for one in read_json(path)]
    except (TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read as a list of modules: {error}") from None
