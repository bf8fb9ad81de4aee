"""/openapi.json, made of the structs that parse the bodies, and /docs, which shows it."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.server.errors import TABLE, ErrorReply, family_of, status_of, tgi_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.http.sse import MEDIA_TYPE, NDJSON

OPENAPI_VERSION = "3.1.0"
_PLACEHOLDER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REF = "#/components/schemas/{name}"
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_TGI_ERROR = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
}


class Documentation:
    """`endpoints` are those of the other dialects."""

    def __init__(self, endpoints: Sequence[Endpoint], version: str) -> None:
        self._page = (files("kvloom.server") / "docs.html").read_bytes()
        self._openapi = cache(lambda: msgspec.json.encode(describe([*endpoints, *self.endpoints], version)))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("GET", "/openapi.json", self.openapi, "This description", is_early=True),
            Endpoint("GET", "/docs", self.docs, "The same, for people", is_early=True),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def openapi(self, request: HttpRequest) -> Reply:
        return Reply(self._openapi())

    async def docs(self, request: HttpRequest) -> Reply:
        return Reply(self._page, media_type="text/html; charset=utf-8")


def describe(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    endpoints = list(endpoints)
    bodies = list(dict.fromkeys(body for endpoint in endpoints for body in endpoint.bodies))
    references, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    schema_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PLACEHOLDER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    errors = {
        "OpenAIError": _OPENAI_ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "OllamaError": _OLLAMA_ERROR,
        "Error": _TGI_ERROR,
    }
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "kvloom",
            "version": version,
            "description": "OpenAI's routes, those of models, chat, completions, responses and embeddings, "
            "are there without /v1 too.",
        },
        "paths": paths,
        "components": {"schemas": {**schemas, **errors}},
    }


def _operation(endpoint: Endpoint, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if endpoint.is_streaming:
        content[NDJSON if family_of(endpoint.path) == "ollama" else MEDIA_TYPE] = {}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [_family(endpoint.path)],
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(endpoint)},
    }
    names = _PLACEHOLDER.findall(endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.bodies:
        schemas = [schema_of[body] for body in endpoint.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _errors(endpoint: Endpoint) -> dict[str, Any]:
    family = family_of(endpoint.path)
    name = {"openai": "OpenAIError", "anthropic": "AnthropicError", "ollama": "OllamaError", "tgi": "Error"}[family]
    statuses = sorted({status_of(kind, family) for kind in TABLE})
    content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
    return {str(status): {"description": "an error", "content": content} for status in statuses}


def _family(path: str) -> str:
    first = path.split("/")[1]
    return first if first in ("v1", "v2", "api") else "other"
