"""How a model writes reasoning and tool calls: one value, from which parser, grammar and prompt follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

SPACE = r"\]<\]\w+\[>\["  # MiniMax M3's token before each tag
# a mark: a tag, or Kimi K3's `<|open|>NAME<|sep|>`
MARK = rf"(?:<\|(?:open|close)\|>[^<]*<\|sep\|>|(?:{SPACE})?<[^<>\s]+>|\[/?[A-Z][A-Z _]+\])"
TYPE = "\x01"  # in `other_end`: the value's type as JSON Schema names it
NAME = "\x02"  # in `address`: the name of the function
KEY = "\x03"  # in `value_end`: the argument's key
CDATA_BEGIN, CDATA_END = "<![CDATA[", "]]>"
ID = "\x00"  # in `head` and `mid`: an id, or a number, that the model makes up

# object    {"name": NAME, "arguments": {...}}, maybe with more members
# keyed     {NAME: {...}}
# json      NAME, then the arguments as a JSON object
# tagged    NAME, then each argument as a key and a value between marks
# elements  NAME, then each argument as an element that its key names, and objects and lists as elements within it
# python    NAME(key=value, ...), also with other brackets and quotes
Kind = Literal["object", "keyed", "json", "tagged", "elements", "python"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written. White space in the marks is written by grammars; a parser allows any.

    is_section: one BEGIN CALL BETWEEN CALL END; else each call has its own begin and end, and `between` separates them.
    CALL: head NAME mid ARGUMENTS tail. An argument of a tagged call: key_begin KEY key_end VALUE value_end, where
    key_end is `other_end` before values that are no text, if these differ. Elements have the same parts, and the key in
    `value_end`.
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
    json_begin: str = ""  # tagged: around all arguments of a call as one JSON object, if a call may have that instead
    json_end: str = ""
    item: str = ""  # elements: the name of an element of a list; "" = objects and lists are JSON
    quote: str = ""  # python: what stands around a text; "" = JSON's quotation mark
    assign: str = "="  # python: between a key and its value; ":" = keys of objects have no quotes either
    literals: tuple[str, ...] = ()  # tagged, python: JSON types whose values are written as Python writes them
    is_sorted: bool = False  # keys come in their alphabetical order
    has_cdata: bool = False  # tagged: texts with `<`, `&` or line breaks stand between CDATA_BEGIN and CDATA_END
    is_single: bool = False  # an answer ends with its first call
    # what a grammar writes: before `begin`; before the first call, if it is more than white space; before a text;
    # special tokens among all of this
    address: str = ""
    lead: str = ""
    text_lead: str = ""
    special_ids: tuple[tuple[str, int], ...] = ()

    @property
    def opening(self) -> str:
        """What begins calls in an answer: `begin`, without the bracket of a list, which models may set apart."""
        return self.begin.removesuffix("[").rstrip() or self.begin

    @property
    def comma(self) -> str:
        """What separates the arguments of a call of the kind python."""
        return ", " if self.assign == "=" else ","

    @property
    def own_quote(self) -> str:
        """The quote, if it is a mark within which nothing is escaped; "" = it is a quotation mark."""
        return self.quote if len(self.quote) > 1 else ""

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
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning, which comes before the answer. `gap`: white space behind the first one."""

    begin: str
    end: str
    gap: str = "\n"
    is_header: bool = False  # `begin` stands before answers without reasoning too


@dataclass(frozen=True, slots=True)
class Channels:
    """Answers that are several messages, each with a header that says what its body is.

    `start` HEADER `body` BODY, and one of `ends` if another message follows; the prompt has the first `start`.
    Regular expressions find in a header that the body is reasoning, or the name of the function that it calls with
    JSON arguments; every other body is text, or holds calls as ChatForm.calls says.
    """

    name: str
    mark: str  # regular expression: a template that it is found in writes so
    start: str
    body: str
    ends: tuple[str, ...]
    openings: tuple[str, ...]  # what a header begins with; none: with the name of a function, or `plain`
    calls: CallForm
    thinking: Thinking | None = None
    reasoning: str = r"(?!)"
    call: str = r"(?!)"
    plain: str = ""  # header of a text, which a grammar writes


THINK = Thinking("<think>", "</think>")
_HARMONY = Thinking("<|channel|>analysis<|message|>", "<|end|>", "")
_ATEM = Thinking(" to=self<|message|>", "<|eom|>", "")
REASONING: Mapping[str, Thinking] = MappingProxyType(
    {
        "think": THINK,
        "mistral": Thinking("[THINK]", "[/THINK]", ""),
        "seed_oss": Thinking("<seed:think>", "</seed:think>"),
        "kimi": Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        "minimax_m3": Thinking("<mm:think>", "</mm:think>", ""),
        "cohere": Thinking("<|START_THINKING|>", "<|END_THINKING|>", ""),
        "gemma4": Thinking("<|channel>thought", "<channel|>"),
        "harmony": _HARMONY,
        "atem": _ATEM,
        "kimi_k3": Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>", ""),
    }
)

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
_M3 = "]<]minimax[>["  # the token before each tag of MiniMax M3
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
        "minimax_m3", "elements", f"{_M3}<tool_call>", f"\n{_M3}</tool_call>", True, f'\n{_M3}<invoke name="', '">',
        f"{_M3}</invoke>", "", f"{_M3}<", ">", value_end=f"{_M3}</{KEY}>", item="item",
    ),
    CallForm(
        "seed_oss", "tagged", "<seed:tool_call>", "\n</seed:tool_call>", False, "\n<function=", ">", "\n</function>",
        "\n", "\n<parameter=", ">", value_end="</parameter>",
    ),
    CallForm(
        "deepseek_v32", "tagged", f"<{_BAR}DSML{_BAR}function_calls>", f"\n</{_BAR}DSML{_BAR}function_calls>", True,
        f'\n<{_BAR}DSML{_BAR}invoke name="', '">', f"\n</{_BAR}DSML{_BAR}invoke>", "",
        f'\n<{_BAR}DSML{_BAR}parameter name="', '" string="true">', '" string="false">',
        f"</{_BAR}DSML{_BAR}parameter>",
    ),
    CallForm(
        "deepseek_v4", "tagged", f"<{_BAR}DSML{_BAR}tool_calls>", f"\n</{_BAR}DSML{_BAR}tool_calls>", True,
        f'\n<{_BAR}DSML{_BAR}invoke name="', '">', f"\n</{_BAR}DSML{_BAR}invoke>", "",
        f'\n<{_BAR}DSML{_BAR}parameter name="', '" string="true">', '" string="false">',
        f"</{_BAR}DSML{_BAR}parameter>",
    ),
    CallForm(
        "minimax_m1", "object", "<tool_calls>", "\n</tool_calls>", True, '\n{"name": "', '", "arguments": ', "}", "",
    ),
    CallForm(
        "apriel", "object", "<tool_calls>[", "]</tool_calls>", True, '{"name": "', '", "arguments": ', "}", ", ",
    ),
    CallForm(
        "gemma4", "python", "<|tool_call>", "<tool_call|>", head="call:", mid="{", tail="}", between="",
        quote='<|"|>', assign=":",
    ),
    CallForm(
        "kimi_k3", "tagged", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", True, '<|open|>call tool="',
        f'" index="{ID}"<|sep|>', "<|close|>call<|sep|>", "", '<|open|>argument key="', '" type="string"<|sep|>',
        f'" type="{TYPE}"<|sep|>', "<|close|>argument<|sep|>",
        '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>",
    ),
    CallForm("granite", "object", "<|tool_call|>[", "]", True, '{"name": "', '", "arguments": ', "}", ", "),
    CallForm("pythonic", "python", "<|tool_call_start|>[", "]<|tool_call_end|>", True, mid="(", tail=")", between=", "),
    CallForm("functionary", "json", "<function=", "</function>", mid=">", between=""),
)  # fmt: skip
CHANNELS = (
    Channels(  # its tokenizer may write a space behind a special token
        "llm_jp", r"<\|constrain\|> json", "<|start|>assistant", "<|message|>",
        ("<|end|>", "<|return|>", "<|call|>", "<|start|> assistant"),
        ("to=", "<|channel|>"),
        CallForm(
            "llm_jp", "json", " to=functions.", mid="<|channel|>commentary <|constrain|> json<|message|>",
            between="<|end|><|start|>assistant",
        ),
        _HARMONY, r"<\|channel\|>\s*analysis",
        r"to=functions\.(?P<name>[\w.-]+)|to=(?P<own>[\w.-]+)", "<|channel|>final",
    ),
    Channels(
        "harmony", r"<\|channel\|>(?:.|\n)*<\|message\|>", "<|start|>assistant", "<|message|>",
        ("<|end|>", "<|return|>", "<|call|>"), ("to=", "<|channel|>"),
        CallForm("harmony", "json", " to=functions.", mid="<|channel|>commentary json<|message|>", is_single=True),
        _HARMONY, r"<\|channel\|>analysis",
        r"to=functions\.(?P<name>[\w.-]+)|to=(?P<own>[\w.-]+)", "<|channel|>final",
    ),
    Channels(
        "atem", r"to=self<\|message\|>", "<|start|>assistant", "<|message|>", ("<|eom|>", "<|eot|>"), ("to=",),
        CallForm(
            "atem", "tagged", "<atem:function_calls>", "\n</atem:function_calls>", False, '\n<atem:invoke name="', '">',
            "\n</atem:invoke>", "<|eom|><|start|>assistant", '\n<atem:parameter name="', '">',
            value_end="</atem:parameter>", address=f" to={NAME}<|message|>",
        ),
        _ATEM, "to=self", plain=" to=user",
    ),
    Channels(
        "functionary_v3.2", r">>>all\\n", ">>>", "\n", ("<|eot_id|>",), (),
        CallForm("functionary_v3.2", "json", mid="\n", between=">>>"), call=r"\A(?!all\Z)(?P<own>[\w.-]+)\Z",
        plain="all",
    ),
)  # fmt: skip
# regular expressions that are found in templates whose calls cannot be asked for -> names of KNOWN
SHOWN_BY: Mapping[str, str] = MappingProxyType(
    {
        r"<\|open\|>(?:.|\n)*open_tag\('tools'\)": "kimi_k3",
        r"<\|tool_list_start\|>|List of tools: \[": "pythonic",
        r"<\|tool_call\|>'? followed by a JSON list": "granite",
    }
)
NO_CALLS = CallForm("none", begin=ID)  # a text never contains its mark
KNOWN: Mapping[str, CallForm] = MappingProxyType({form.name: form for form in _KNOWN})


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a model writes its answers. `found`: how the form of calls is known, for people."""

    calls: CallForm = HERMES
    thinking: Thinking | None = None
    channels: Channels | None = None
    hidden: tuple[str, ...] = ()  # marks around an answer's text, which are no text
    before_text: str = ""  # what stands before an answer's text, behind its reasoning
    specials: tuple[str, ...] = ()  # special tokens among the marks, which must be seen to be read
    takes_tools: bool = False  # the template shows tools to the model; otherwise a prompt of ours does
    kept: tuple[str, ...] = ()  # names under which the template reads the reasoning of earlier answers
    found: str = "a guess"

    @property
    def is_thinking(self) -> bool:
        """Whether answers may begin with reasoning."""
        return self.thinking is not None

    @property
    def breaks(self) -> tuple[str, ...]:
        """Marks of calls that end reasoning whose own end is missing: those that no text has."""
        begin, is_open = self.calls.opening, self.thinking is not None and self.thinking.is_header
        found = (begin,) if begin and is_open else ()
        marks = (begin, self.calls.head.split(ID)[0].strip())  # models leave out the first of both
        return tuple(dict.fromkeys((*found, *(mark for mark in marks if any(one in mark for one in self.specials)))))

    def __str__(self) -> str:
        """For people: which form of calls was found, and how."""
        found = f"from {self.found}" if self.takes_tools else "described in the system message"
        reasoning = f"{self.thinking.begin.strip()}...{self.thinking.end}" if self.thinking else "none"
        return f"calls: {self.calls.name}, {found}; reasoning: {reasoning}"
