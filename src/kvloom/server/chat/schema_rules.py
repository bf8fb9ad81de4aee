"""What grammars of values that are no JSON have in common: which types a schema allows, and what they do not hold."""

from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import CallForm
from kvloom.server.chat.tools import Tool
from kvloom.server.serving.notes import note

_NOT_HELD = (
    "allOf", "not", "if", "patternProperties", "propertyNames", "prefixItems", "contains", "dependentSchemas",
    "minProperties", "maxProperties", "uniqueItems",
)  # fmt: skip


class SchemaRules:
    """Collects the rules of one tool's arguments. `rule`: the name with which those of its rules begin. `root` holds
    what references lead to.
    """

    def __init__(self, form: CallForm, rule: str, tool: Tool, root: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.form, self.rule, self.tool, self.root = form, rule, tool, root
        self.shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._names: dict[tuple[Any, ...], str] = {}

    def named(self, *of: Any) -> tuple[str, bool]:
        """The name of the rule of something, and whether it is new."""
        is_new = of not in self._names
        return self._names.setdefault(of, f"{self.rule}_{len(self._names)}"), is_new

    def types(self, option: dict[str, Any], others: tuple[str, ...]) -> list[str]:
        """The types of an option of a schema; "enum" = it lists its values. `others`: what it allows if it says
        nothing. Raises BadRequest.
        """
        for word in _NOT_HELD:
            if word in option:
                self._refuse(word)
        if "const" in option or isinstance(option.get("enum"), list):
            return ["enum"]
        given = option.get("type", others)
        return [given] if isinstance(given, str) else list(given)

    def _refuse(self, word: str) -> None:
        """Raises BadRequest where a tool is strict."""
        if self.tool.is_strict:
            raise BadRequest(self.tool.schema_field, f"has {word}, which calls of this model cannot be held to")
        note(f"{word} of the schema is not held")


def values_of(option: dict[str, Any]) -> list[Any]:
    """The values that a schema lists."""
    return list(option["enum"]) if "enum" in option else [option["const"]]
