"""The console: a page for people, the figures that it draws, and the end of a request they choose.

The figures are one small JSON document a poll, made of counters that exist anyway; nothing is kept between polls.
"""

import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from kvloom.engine.errors import NotFound, ServingError
from kvloom.server.errors import ErrorReply, NoRoute, tgi_reply
from kvloom.server.generation import GenerationService, Running
from kvloom.server.health import Health
from kvloom.server.meter import Histogram
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Reply

MAX_ROWS = 200  # running requests told in a feed, the oldest
PAGE = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Name -> (content, media type) of the page's files."""
    folder = files("kvloom.server") / "console"
    found = {}
    for item in folder.iterdir():
        kind = _TYPES.get(item.name[item.name.rfind(".") :])
        if kind is not None:
            found[item.name] = (item.read_bytes(), f"{kind}; charset=utf-8")
    return found


FILES = _page_files()
OPEN_PATHS = ("/console", *(f"/console/{name}" for name in FILES))  # a page holds no secret; its data wants the key


class Console:
    """`config` is what config_view shows."""

    def __init__(self, models: Models, health: Health, config: Mapping[str, Any], version: str = "") -> None:
        self._models, self._health = models, health
        self._config = {"version": version, **config}
        self._encode = msgspec.json.Encoder().encode
        self._began = time.monotonic()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("GET", "/console", self.page, "The console, for people", is_everywhere=True),
            Endpoint("GET", "/console/feed", self.feed, "Figures of this moment, and what runs", is_management=True),
            Endpoint("GET", "/console/config", self.config, "The configuration, secrets masked", is_management=True),
            Endpoint("DELETE", "/console/requests/{id:path}", self.cancel, "End a running request", is_management=True),
            Endpoint("GET", "/console/{name}", self.file, "A part of the page", is_everywhere=True),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def page(self, call: Call) -> Reply:
        return _file(PAGE)

    async def file(self, call: Call) -> Reply:
        """Raises NoRoute."""
        name = call.path["name"]
        if name not in FILES:
            raise NoRoute(f"there is no route /console/{name}")
        return _file(name)

    async def config(self, call: Call) -> Reply:
        """What was measured at start stands where the configuration left it open."""
        measured = {service.name: _measured(service) for service in self._models}
        models = [{**card, **measured.get(card["name"], {})} for card in self._config["models"]]
        return Reply(self._encode({**self._config, "models": models}))

    async def feed(self, call: Call) -> Reply:
        """Totals are since the start, as in /metrics; times in seconds. Requests: the oldest MAX_ROWS."""
        admission = self._models.admission
        running = [(service, item) for service in self._models for item in service.running()]
        running.sort(key=lambda pair: -pair[1].timing.age_s)
        document = {
            "uptime_s": time.monotonic() - self._began,
            "is_draining": self._health.is_draining,
            "num_queued": admission.num_waiting,
            "max_served": admission.limit,
            "models": [_figures(service) for service in self._models],
            "num_requests": len(running),
            "requests": [_row(service, item) for service, item in running[:MAX_ROWS]],
        }
        return Reply(self._encode(document), headers={"Cache-Control": "no-store"})

    async def cancel(self, call: Call) -> Reply:
        """It ends with the tokens it has, once. Raises NotFound."""
        id = call.path["id"]
        if not any([service.stop(id) for service in self._models]):
            raise NotFound(f"no request {id!r} is running")
        return Reply(self._encode({"id": id}))


def _file(name: str) -> Reply:
    body, media_type = FILES[name]
    return Reply(body, media_type=media_type, headers=_HEADERS)


def _figures(service: GenerationService) -> dict[str, Any]:
    stats, meter = service.engine.stats(), service.meter
    figures: dict[str, Any] = {
        "name": service.name,
        "is_ready": service.engine.is_ready,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "max_batch": stats.max_batch,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_cached_blocks": stats.num_cached_blocks,
        "block_size": service.engine.info.block_size,
        "prompt_tokens": stats.total_prompt_tokens,
        "cached_tokens": stats.total_cached_tokens,
        "output_tokens": stats.total_output_tokens,
        "preemptions": stats.total_preemptions,
        "restarts": stats.total_restarts,
        "received": meter.num_received,
        "failed": meter.num_failed,
        "first_token": _sums(meter.first_token),
        "between_tokens": _sums(meter.between_tokens),
        "pool": None,
    }
    if service.card.engine.kv_tier is not None:
        figures["pool"] = {
            "loaded_blocks": stats.total_tier_loaded_blocks,
            "saved_blocks": stats.total_tier_saved_blocks,
        }
    return figures


def _measured(service: GenerationService) -> dict[str, Any]:
    info = service.engine.info
    return {
        "max_seq_len": service.engine.max_seq_len,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "num_host_blocks": info.num_host_blocks,
    }


def _sums(histogram: Histogram) -> dict[str, float]:
    return {"count": sum(histogram.counts), "sum_s": histogram.sum}


def _row(service: GenerationService, item: Running) -> dict[str, Any]:
    """Never what the request says."""
    timing = item.timing
    state = "decode" if timing.num_tokens else "prefill" if timing.has_place else "queued"
    return {
        "id": item.generation.id,
        "model": service.name,
        "state": "stopping" if item.ticket.is_stopped else state,
        "prompt_tokens": sum(map(len, item.generation.prompts)),
        "generated": timing.num_tokens,
        "age_s": timing.age_s,
        "client": item.generation.tenant[:8],
    }
