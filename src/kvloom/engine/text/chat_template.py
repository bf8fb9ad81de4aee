"""Chat templates: turn a conversation into the text that the model was trained to continue.

Templates come with models, from strangers: their loops, calls and repetitions are counted, so that none runs for ever.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.contract.errors import BadRequest

MAX_STEPS = 3_000_000  # of one rendering (some seconds): an iteration of a loop is one step, a call is _CALL
_CALL = 5
MAX_DEPTH = 100  # of nested calls
_CHANGES = ("append", "pop")  # methods of lists that templates use
MAX_REPEATED = 2**24  # characters or items of `text * number`; bits of a power


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
            if any(f".{change}" in self._templates[name] for change in _CHANGES):
                values = deepcopy(values)  # so that no list but its own is changed
            values["add_generation_prompt"] = add_generation_prompt
            try:
                return _rendered(self._template(name), values)
            except TypeError:  # it wants a list, and there are no tools
                if tools is not None:
                    raise
                return _rendered(self._template(name), {**values, "tools": []})
        except Exception as error:  # a template can raise anything
            raise BadRequest("messages", f"the model's chat template refuses them: {error}") from None

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = _ENVIRONMENT.from_string(self._templates[name])
        return self._compiled[name]


class _Spent:
    """Steps and depth of one rendering so far."""

    __slots__ = ("depth", "steps")

    def __init__(self) -> None:
        self.steps = self.depth = 0

    def take(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise TemplateError(f"its loops and calls do not end within {MAX_STEPS} steps")


_SPENT: ContextVar[_Spent] = ContextVar("spent")


def _rendered(template: Template, values: dict[str, Any]) -> str:
    """Like Template.render, which rewrites tracebacks: that takes seconds behind deep calls."""
    _SPENT.set(_Spent())
    return "".join(template.root_render_func(template.new_context(values)))


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a template's loop, each counted as a step."""
    spent = _SPENT.get()
    for item in items:
        spent.take(1)
        yield item


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which loops, calls and repetitions have bounds."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        spent = _SPENT.get()
        spent.take(_CALL)
        if spent.depth >= MAX_DEPTH:
            raise TemplateError(f"its calls are more than {MAX_DEPTH} deep")
        spent.depth += 1
        try:
            return super().call(context, function, *args, **kwargs)
        finally:
            spent.depth -= 1

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's sandbox refuses to change lists; here those that a template sees are its own, or copies."""
        return super().is_safe_attribute(obj, attr, value) or (attr in _CHANGES and type(obj) is list)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_REPEATED:
            raise TemplateError(f"{operator} makes more than {MAX_REPEATED} characters, items or bits")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Size of the operator's result: characters of a text, items of a list, bits of a whole number; 0 = small."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    times, what = (left, right) if isinstance(left, int) else (right, left)
    return max(times, 0) * len(what) if isinstance(times, int) and hasattr(what, "__len__") else 0


class _Generation(Extension):
    """`{% generation %}`, with which training code marks answers: its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_listed, **options)


def _listed(value: Any) -> list[Any]:
    """What filters such as `map` give, as JSON has it."""
    if not isinstance(value, Iterator):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return list(value)


_ENVIRONMENT = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
_ENVIRONMENT.filters["counted"] = _counted
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.filters["from_json"] = json.loads
_ENVIRONMENT.globals["raise_exception"] = _refuse
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
