"""Chat templates: turn a conversation into the text that the model was trained to continue."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.contract.errors import BadRequest

_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError)


class ChatTemplates:
    """The templates of one model by name: "default", and "tool_use" where tools need another. `values`: variables they
    may read.
    """

    def __init__(self, templates: Mapping[str, str], values: Mapping[str, Any]) -> None:
        self._templates, self._values = templates, values
        self._compiled: dict[str, Template] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplates, (self._templates, self._values)

    def source(self, has_tools: bool) -> str:
        """The template's own text; "" when there is none."""
        return self._templates.get(self._name(has_tools), "")

    def apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **more: Any,
    ) -> str:
        """Raises BadRequest when the template refuses the messages or there is none."""
        name = self._name(bool(tools))
        if name not in self._templates:
            raise BadRequest("messages", "this model has no chat template; use completions")
        values = {**self._values, **more, "messages": messages, "tools": tools}
        try:
            return self._template(name).render(**values, add_generation_prompt=add_generation_prompt)
        except _REFUSALS as error:
            raise BadRequest("messages", f"the model's chat template refuses them: {error}") from None

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = _ENVIRONMENT.from_string(self._templates[name])
        return self._compiled[name]


class _Generation(Extension):
    """`{% generation %}`, with which training code marks answers: its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _refuse
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
