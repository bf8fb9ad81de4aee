"""How a model writes reasoning and tool calls: one value, from which parser, grammar and prompt follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ID = "\x00"  # in `head` and `mid`: an id, or a number, that the model makes up

# object  {"name": NAME, "arguments": {...}}, maybe with more members
# keyed   {NAME: {...}}
# json    NAME, then the arguments as a JSON object
# tagged  NAME, then each argument as a key and a value between marks
# python  NAME(key=value, ...), also with other brackets and quotes
Kind = Literal["object", "keyed", "json", "tagged", "python"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written. White space in the marks is written by grammars; a parser allows any.

    is_section: one BEGIN CALL BETWEEN CALL END; else each call has its own begin and end, and `between` separates them.
    CALL: head NAME mid ARGUMENTS tail. An argument of a tagged call: key_begin KEY key_end VALUE value_end, where
    key_end is `other_end` before values that are no text, if these differ.
    """

    name: str
    kind: Kind = "object"
    begin: str = ""
    end: str = ""
    is_section: bool = False
    head: str = ""
    mid: str = ""
    tail: str = ""
    between: str = "\n"
    key_begin: str = ""
    key_end: str = ""
    other_end: str = ""
    value_end: str = ""
    quote: str = ""  # python: what stands around a text; "" = a quotation mark
    assign: str = "="  # python: between a key and its value

    @property
    def marks(self) -> tuple[str, ...]:
        """All literal texts of calls."""
        return (
            self.begin,
            self.head,
            self.mid,
            self.tail,
            self.end,
            self.key_begin,
            self.key_end,
            self.value_end,
            self.quote,
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning, which comes before the answer."""

    begin: str
    end: str


THINK = Thinking("<think>", "</think>")


HERMES = CallForm(
    "hermes", "object", "<tool_call>", "\n</tool_call>",
    head='\n{"name": "', mid='", "arguments": ', tail="}",
)  # fmt: skip
QWEN3_CODER = CallForm(
    "qwen3_coder", "tagged", "<tool_call>", "\n</tool_call>", head="\n<function=", mid=">", tail="\n</function>",
    key_begin="\n<parameter=", key_end=">\n", value_end="\n</parameter>",
)  # fmt: skip
LLAMA3 = CallForm("llama3", "object", head='{"name": "', mid='", "parameters": ', tail="}", between="; ")
_BAR = "\uff5c"  # the bar in the marks of DeepSeek's models
_KNOWN = (
    HERMES,
    QWEN3_CODER,
    LLAMA3,
    CallForm("mistral", "json", "[TOOL_CALLS]", mid="[ARGS]", between=""),
    CallForm(
        "mistral_list", "object", "[TOOL_CALLS][", "]", True, '{"name": "', '", "arguments": ', "}", between=", "
    ),
    CallForm(
        "glm45", "tagged", "<tool_call>", "\n</tool_call>",
        key_begin="\n<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>",
    ),
    CallForm(
        "kimi_k2", "json", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", True,
        "<|tool_call_begin|>functions.", f":{ID}<|tool_call_argument_begin|>", "<|tool_call_end|>", "",
    ),
    CallForm(
        "deepseek_v3", "json", f"<{_BAR}tool\u2581calls\u2581begin{_BAR}>", f"<{_BAR}tool\u2581calls\u2581end{_BAR}>",
        True, f"<{_BAR}tool\u2581call\u2581begin{_BAR}>function<{_BAR}tool\u2581sep{_BAR}>", "\n```json\n",
        f"\n```<{_BAR}tool\u2581call\u2581end{_BAR}>",
    ),
    CallForm(
        "deepseek_v31", "json", f"<{_BAR}tool\u2581calls\u2581begin{_BAR}>", f"<{_BAR}tool\u2581calls\u2581end{_BAR}>",
        True, f"<{_BAR}tool\u2581call\u2581begin{_BAR}>", f"<{_BAR}tool\u2581sep{_BAR}>",
        f"<{_BAR}tool\u2581call\u2581end{_BAR}>", "",
    ),
    CallForm(
        "minimax_m2", "tagged", "<minimax:tool_call>", "\n</minimax:tool_call>", True, '\n<invoke name="', '">',
        "\n</invoke>", "", '\n<parameter name="', '">', value_end="</parameter>",
    ),
    CallForm(
        "seed_oss", "tagged", "<seed:tool_call>", "\n</seed:tool_call>", False, "\n<function=", ">", "\n</function>",
        "\n", "\n<parameter=", ">", value_end="</parameter>",
    ),
    CallForm("pythonic", "python", "<|tool_call_start|>[", "]<|tool_call_end|>", True, mid="(", tail=")", between=", "),
    CallForm("functionary", "json", "<function=", "</function>", mid=">", between=""),
)  # fmt: skip
NO_CALLS = CallForm("none", begin=ID)  # a text never contains its mark
KNOWN: Mapping[str, CallForm] = MappingProxyType({form.name: form for form in _KNOWN})


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a model writes its answers. `found`: how the form of calls is known, for people."""

    calls: CallForm = HERMES
    thinking: Thinking | None = None
    hidden: tuple[str, ...] = ()  # marks around an answer's text, which are no text
    is_special: bool = False  # some of the marks are special tokens, which must be seen to be read
    takes_tools: bool = False  # the template shows tools to the model; otherwise a prompt of ours does
    found: str = "a guess"

    @property
    def is_thinking(self) -> bool:
        """Whether answers may begin with reasoning."""
        return self.thinking is not None

    def __str__(self) -> str:
        reasoning = f"{self.thinking.begin}...{self.thinking.end}" if self.thinking else "none"
        return f"calls: {self.calls.name}'s, from {self.found}; reasoning: {reasoning}"
