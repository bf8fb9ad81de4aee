"""`kvloom models`: the models on this machine by name, with properties and memory."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import Checkpoint, open_checkpoint
from kvloom.checkpoints.demo_models import MODELS, linked, pulled
from kvloom.checkpoints.facts import facts_of
from kvloom.checkpoints.files import read_text
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.metadata import read_header
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.rank.opening import model_tokenizer
from kvloom.server.chat.style import form_of

_LICENCE = re.compile(r"^license(?:_name)?:\s*(\S+)", re.MULTILINE)  # in a model card's header


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model of the list. Unknown fields are empty or 0."""

    name: str
    path: str = ""  # "" = not fetched yet
    family: str = ""
    format: str = ""  # format of the file, and the type of most of its weights
    file_bytes: int = 0
    licence: str = ""
    weight_bytes: int = 0  # memory of the weights in the CPU backend's default form
    token_bytes: int = 0  # KV cache bytes for each token of context
    makes: str = ""  # "text", "embeddings", "labels"
    writes: str = ""  # how it writes tool calls and reasoning, and how that was found; "" without a chat template
    problem: str = ""  # why it cannot be served


def rows() -> list[ModelRow]:
    """Demo models, fetched or not, then the user's own models."""
    demo = [
        _row(name, path, model.licence)
        if (path := pulled(name)) is not None
        else ModelRow(name, file_bytes=model.size_bytes, licence=model.licence)
        for name, model in MODELS.items()
    ]
    return demo + [_row(name, path) for name, path in linked().items()]


def _row(name: str, path: Path, licence: str = "") -> ModelRow:
    weights, token, problem, family, makes = 0, 0, "", "", ""
    try:
        path = find_weights(path)
        checkpoint = open_checkpoint(path)
        spec = checkpoint.spec
        family, makes = spec.family, _made(checkpoint)
        config = EngineConfig(model=str(path))
        weights = footprint.weight_bytes(config, "cpu", spec, checkpoint.weights.form)
        token = footprint.kv_token_bytes(config, "cpu", spec)
    except ModelError as error:
        problem = str(error)
    facts = facts_of(path)
    return ModelRow(
        name,
        str(path),
        family or facts.family,
        f"{facts.format} {facts.kind}".strip(),
        facts.num_bytes,
        licence or _licence(path),
        weights,
        token,
        makes,
        _writes(path) if makes == "text" else "",
        problem,
    )


def _writes(path: Path) -> str:
    """The form of the model's tool calls and reasoning, as its chat template shows it."""
    try:
        tokenizer = model_tokenizer(str(path))
    except ModelError:
        return ""
    return str(form_of(tokenizer, True)) if tokenizer.chat_template(has_tools=True) else ""


def _made(checkpoint: Checkpoint) -> str:
    """The model's output, in a word."""
    if checkpoint.embedding.labels:
        return "labels"
    return "text" if checkpoint.spec.has_logits else "embeddings"


def _licence(path: Path) -> str:
    """The licence named in the model's files: a GGUF file's metadata, a folder's model card."""
    try:
        if path.is_file():
            return str(read_header(path, has_texts=False).metadata.get("general.license", ""))
        head = read_text(path / "README.md", 1 << 20)
    except ModelError:
        return ""
    found = _LICENCE.search(head) if head.startswith("---") else None
    return found[1] if found else ""


def lines(found: list[ModelRow]) -> list[str]:
    """A table for people."""
    head = (
        "NAME",
        "FAMILY",
        "FORMAT",
        "FILE",
        "LICENCE",
        "WEIGHTS IN MEMORY",
        "1,000 TOKENS OF KV",
        "MAKES",
        "WRITES",
        "",
    )
    table = [head]
    for row in found:
        note = "not fetched: kvloom pull " + row.name if not row.path else row.problem
        sizes = (_mib(row.file_bytes), _mib(row.weight_bytes), _mib(1000 * row.token_bytes))
        table.append(
            (row.name, row.family, row.format, sizes[0], row.licence, sizes[1], sizes[2], row.makes, row.writes, note)
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes else "-"
