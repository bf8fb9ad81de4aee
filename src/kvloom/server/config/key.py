"""Key: the type and range of one key of config.json, and the error for a wrong value."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvloom.contract.errors import BadRequest

_TYPE_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object"
}  # fmt: skip
Type: TypeAlias = type[Any]
MAX_SHOWN = 100  # characters of a wrong value in a message
PATH = 4096  # characters of a path; spec tables 2-2 to 2-5 say 4096 and 2048, later releases 4096 throughout


@dataclass(frozen=True, slots=True)
class Key:
    """One key. It is idle, which the log says, without a `setting`, unless `choices` only permit what is done anyway.

    `low` and `high` bound a number; `longest` is the maximum length of a text in characters; `items` is the type of a
    list's elements; `pattern`, which `form` describes in words, must match a whole text; `check_more` raises
    BadRequest("", problem). `read` makes one value of several spellings.

    `flag` is the option of `kvloom serve` that overrides the setting; `help` is its text where that is not the meaning,
    {choices} in it the permitted values.
    """

    type: Type | tuple[Type, ...]
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    setting: str = ""
    default: Any = None  # what `kvloom config init` writes; None = not written
    is_required: bool = False
    longest: int | None = None
    items: Type | None = None
    pattern: str = ""
    form: str = ""
    check_more: Callable[[Any], None] | None = None
    read: Callable[[Any], Any] | None = None
    default_https: Any = None  # what `kvloom config init --https` writes instead
    flag: str = ""
    help: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether its value is checked but has no effect."""
        return not self.setting and not self.choices

    @property
    def types(self) -> tuple[Type, ...]:
        return self.type if isinstance(self.type, tuple) else (self.type,)

    @property
    def allowed(self) -> str:
        """Type and range, for people."""
        if self.choices:
            return ", ".join(map(json.dumps, self.choices))
        name = " or ".join(_TYPE_NAMES[t] for t in self.types)
        if self.form:
            return self.form
        if self.low is None:
            return name
        return f"{name}, {self.low:.15g} or more" if self.high is None else f"{name}, {self._range}"

    @property
    def _range(self) -> str:
        return f"{self.low:.15g} to {self.high:.15g}"

    def check(self, path: str, value: Any) -> None:
        """Raises BadRequest with the JSON path, the value and the permitted values."""
        problem = self._problem(value)
        if problem:
            raise BadRequest(path, problem)
        if self.check_more is not None:
            try:
                self.check_more(value)
            except BadRequest as error:
                raise BadRequest(path, error.problem) from None

    def _problem(self, value: Any) -> str:
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            name = " or ".join(_TYPE_NAMES[t] for t in self.types)
            if self.choices:
                return f"must be one of {self.allowed}, got {shown(value)}"
            limits = "" if self.low is None else f" of {self.low:.15g} or more" if self.high is None else ""
            limits = f" from {self._range}" if self.high is not None else limits
            return f"must be {name}{limits}, got {shown(value)}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, got {value}"
        if self.choices and value not in self.choices:
            return f"must be one of {self.allowed}, got {shown(value)}"
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            limit = (
                f"at least {self.low:.15g}" if self.high is None else f"between {self.low:.15g} and {self.high:.15g}"
            )
            return f"must be {limit}, got {value}"
        return self._problem_of_text(value) if isinstance(value, str) else self._problem_of_list(value)

    def _problem_of_text(self, value: str) -> str:
        if self.longest is not None and len(value) > self.longest:
            return f"must have at most {self.longest} characters, it has {len(value)}"
        if problem := _no_text(value):
            return f"must not hold {problem}"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"must be {self.form}, got {shown(value)}"
        return ""

    def _problem_of_list(self, value: Any) -> str:
        if self.items is not None and isinstance(value, list):
            for item in value:
                if not isinstance(item, self.items) or isinstance(item, bool):
                    return f"must be a list of which each is {_TYPE_NAMES[self.items]}, got {shown(item)} in it"
                if isinstance(item, str) and self.longest is not None and len(item) > self.longest:
                    return f"must hold texts of at most {self.longest} characters, one has {len(item)}"
                if isinstance(item, str) and (problem := _no_text(item)):
                    return f"must not hold {problem}"
        return ""


def _no_text(value: str) -> str:
    """The characters of it that cannot occur in a path or a message."""
    if "\0" in value:
        return "a NUL character"
    half = next((character for character in value if "\ud800" <= character <= "\udfff"), "")
    return f"{json.dumps(half)}, half a character" if half else ""


def needed(
    type_: Any, default: Any, meaning: str, low: float | None = None, high: float | None = None, **more: Any
) -> Key:
    """A required key; `default` is what `kvloom config init` writes."""
    return Key(type_, meaning, low, high, default=default, is_required=True, **more)


def shown(value: Any) -> str:
    """A value as written in the file, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_devices(value: list[Any]) -> None:
    """npuDeviceIds: for each model a list of device numbers, none twice in one; [0, 1] for [[0, 1]]. Raises
    BadRequest.
    """
    form = "must be a list of lists of device numbers, as [[0, 1]], one list a model"
    lists = [value] if value and not any(isinstance(ids, list) for ids in value) else value
    if not lists or not all(isinstance(ids, list) and ids for ids in lists):
        raise BadRequest("", f"{form}, got {shown(value)}")
    for ids in lists:
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1024 for i in ids):
            raise BadRequest("", f"{form} from 0 to 1023, got {shown(ids)}")
        if len(set(ids)) < len(ids):
            raise BadRequest("", f"must name each device of a model once, got {shown(ids)}")


def check_not_empty(value: str) -> None:
    """A text that must say something. Raises BadRequest."""
    if not value:
        raise BadRequest("", "must not be empty")


def check_gap(value: float) -> None:
    """maxDecodeGap. Raises BadRequest."""
    if -1 < value < 0:
        raise BadRequest("", f"must be -1 or 0 ms and more, got {value}")
