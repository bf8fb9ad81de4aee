"""Ollama's /api/tags, /api/ps and /api/show: descriptions of models. Files are read once, on a thread."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvloom.checkpoints.facts import ModelFacts, facts_of
from kvloom.server.chat.style import form_of
from kvloom.server.serving.files import ReadOnce
from kvloom.server.serving.service import GenerationService

Json = dict[str, Any]
NEVER = "9999-12-31T23:59:59Z"  # when a model is put out of memory


class ModelTable:
    """`started`: start of the server, seconds since 1970; the date of models without files."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._facts = ReadOnce(_facts_of)

    async def tag(self, service: GenerationService) -> Json:
        """A line of /api/tags."""
        facts = await self._facts.of(service)
        return {
            **_named(service),
            "modified_at": _time(facts.modified or self._started),
            "size": facts.num_bytes,
            "digest": digest_of(service),
            "details": _details(service, facts),
        }

    async def loaded(self, service: GenerationService) -> Json:
        """A line of /api/ps. Sizes are in bytes, of the weights and the KV cache."""
        info = service.engine.info
        size = info.weight_bytes + info.kv_bytes
        return {
            **_named(service),
            "size": size,
            "digest": digest_of(service),
            "details": _details(service, await self._facts.of(service)),
            "expires_at": NEVER,
            "size_vram": 0 if service.card.engine.device == "cpu" else size,
            "context_length": service.engine.max_seq_len,
        }

    async def show(self, service: GenerationService) -> Json:
        facts = await self._facts.of(service)
        template = service.tokenizer.chat_template()
        style = form_of(service.tokenizer, False, service.card.tool_parser, service.card.reasoning_parser)
        name = _named(service)["name"]
        more = [word for word, has in (("thinking", style.is_thinking), ("vision", service.engine.info.sees)) if has]
        return {
            "modelfile": f"# as kvloom serves it\nFROM {name}\n",
            "parameters": "",
            "template": template,
            "details": _details(service, facts),
            "model_info": {
                "general.architecture": facts.family,
                "general.basename": service.name,
                "general.parameter_count": facts.num_parameters,
                f"{facts.family}.context_length": service.engine.max_seq_len,
                f"{facts.family}.embedding_length": service.engine.info.hidden_size,
            },
            "capabilities": ["completion", "tools", *more],
            "modified_at": _time(facts.modified or self._started),
        }


def _facts_of(service: GenerationService) -> ModelFacts:
    path = service.card.engine.model
    return facts_of(Path(path)) if path else ModelFacts("fake")


def digest_of(service: GenerationService) -> str:
    """Identifies a model or adapter by its properties and path; weights are not read for it."""
    return hashlib.sha256(f"{service.name}\0{service.card.engine.model}\0{service.root}".encode()).hexdigest()


def _named(service: GenerationService) -> Json:
    name = service.name if ":" in service.name else f"{service.name}:latest"
    return {"name": name, "model": name}


def _details(service: GenerationService, facts: ModelFacts) -> Json:
    return {
        "parent_model": service.parent or "",
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": _short(facts.num_parameters),
        "quantization_level": facts.kind,
    }


def _short(count: int) -> str:
    """134,515,008 -> 134.52M; "" when unknown."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + letter
    return str(count or "")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
