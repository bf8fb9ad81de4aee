"""The console: a page for people, the figures that it draws, and the end of a request they choose.

The figures are one small JSON document a poll, made of counters that exist anyway; nothing is kept between polls.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import msgspec

from kvloom.contract.errors import NotFound, ServingError
from kvloom.contract.sampling import advice_text
from kvloom.engine.histogram import Histogram
from kvloom.server.errors import ErrorReply, NoRoute, tgi_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.engine import Replicated
from kvloom.server.serving.health import Health
from kvloom.server.serving.pictures.service import Painting, PictureService
from kvloom.server.serving.registry import Models
from kvloom.server.serving.running import Running
from kvloom.server.serving.service import GenerationService

MAX_ROWS = 200  # most running requests in a feed, the oldest ones
PAGE = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
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
    """`config`: the result of config_view."""

    def __init__(self, models: Models, health: Health, config: Mapping[str, Any], version: str = "") -> None:
        self._models, self._health = models, health
        self._config = {"version": version, **config}
        self._encode = msgspec.json.Encoder().encode

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("GET", "/console", self.page, "The console, for people", is_everywhere=True, is_early=True),
            Endpoint("GET", "/console/feed", self.feed, "Figures of this moment, and what runs", is_management=True),
            Endpoint("GET", "/console/config", self.config, "The configuration, secrets masked", is_management=True),
            Endpoint("DELETE", "/console/requests", self.cancel, "End the running request ?id=", is_management=True),
            Endpoint("DELETE", "/console/requests/{id:path}", self.cancel, "End a running request", is_management=True),
            Endpoint("GET", "/console/{name}", self.file, "A part of the page", is_everywhere=True, is_early=True),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def page(self, request: HttpRequest) -> Reply:
        return _file(PAGE)

    async def file(self, request: HttpRequest) -> Reply:
        """Raises NoRoute."""
        name = request.path["name"]
        if name not in FILES:
            raise NoRoute(f"there is no route /console/{name}")
        return _file(name)

    async def config(self, request: HttpRequest) -> Reply:
        """The configuration; values that it leaves open are those measured at the start."""
        measured = {service.name: _measured(service) for service in self._models}
        models = [{**card, **measured.get(card["name"], {})} for card in self._config["models"]]
        return Reply(self._encode({**self._config, "models": models}))

    async def feed(self, request: HttpRequest) -> Reply:
        """Totals are since the start, as in /metrics; times in seconds. Requests: the oldest MAX_ROWS."""
        admission = self._models.admission
        pictures = self._models.pictures
        rows = [_row(service, item) for service in self._models for item in service.running()]
        rows += [_picture_row(service, item) for service in pictures for item in service.running()]
        rows.sort(key=lambda row: -row["age_s"])
        document = {
            "uptime_s": request.time_s - self._models.started_s,
            "is_draining": self._health.is_draining,
            "num_queued": admission.num_waiting,
            "max_served": admission.limit,
            "models": [_figures(service) for service in self._models],
            "pictures": [_picture_figures(service) for service in pictures],
            "num_requests": len(rows),
            "requests": rows[:MAX_ROWS],
        }
        return Reply(self._encode(document), headers={"Cache-Control": "no-store"})

    async def cancel(self, request: HttpRequest) -> Reply:
        """It ends with the tokens it has, once; one for pictures with an error. Raises NotFound."""
        id = request.path.get("id") or request.query.get("id", "")
        if not any([service.stop(id) for service in (*self._models, *self._models.pictures)]):
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
        "accepted_tokens": stats.total_accepted_tokens,
        "preemptions": stats.total_preemptions,
        "restarts": stats.total_restarts,
        "received": meter.num_received,
        "failed": meter.num_failed,
        "first_token": _sums(meter.first_token),
        "between_tokens": _sums(meter.between_tokens),
        "pool": None,
    }
    if isinstance(engine := service.engine, Replicated):
        figures |= {"moves": engine.num_moves, "lost": engine.num_lost, "replicas": [*map(asdict, engine.replicas())]}
    if service.card.engine.kv_tier is not None:
        figures["pool"] = {
            "loaded_blocks": stats.total_tier_loaded_blocks,
            "saved_blocks": stats.total_tier_saved_blocks,
        }
    return figures


def _picture_figures(service: PictureService) -> dict[str, Any]:
    waiting, meter = service.admission.num_waiting, service.meter
    return {
        "name": service.name,
        "is_ready": service.painter.is_ready,
        "num_running": service.admission.num_active - waiting,
        "num_waiting": waiting,
        "received": meter.num_received,
        "failed": meter.num_failed,
        "pictures": meter.num_pictures,
        "restarts": service.painter.num_restarts,
    }


def _picture_row(service: PictureService, item: Painting) -> dict[str, Any]:
    """Its state is how far the picture is."""
    which = f" of picture {item.picture + 1}" if item.num_pictures > 1 else ""
    state = f"step {item.step} of {item.num_steps}{which}" if item.num_steps else "decode"
    return {
        "id": item.id,
        "model": service.name,
        "state": "stopping" if item.is_stopped else state if item.is_painting else "queued",
        "prompt_tokens": None,
        "generated": None,
        "age_s": item.age_s,
        "client": item.tenant[:8],
    }


def _measured(service: GenerationService) -> dict[str, Any]:
    info = service.engine.info
    return {
        "max_seq_len": service.engine.max_seq_len,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "num_host_blocks": info.num_host_blocks,
        "advice": advice_text(service.card.advice),
    }


def _sums(histogram: Histogram) -> dict[str, float]:
    return {"count": histogram.count, "sum_s": histogram.sum}


def _row(service: GenerationService, item: Running) -> dict[str, Any]:
    """A running request, without its texts."""
    timing = item.timing
    state = "decode" if timing.num_tokens else "prefill" if timing.has_slot else "queued"
    return {
        "id": item.generation.id,
        "model": service.name,
        "state": "stopping" if item.ticket.is_stopped else state,
        "prompt_tokens": item.generation.num_prompt_tokens,
        "generated": timing.num_tokens,
        "age_s": timing.age_s,
        "client": item.generation.tenant[:8],
    }
