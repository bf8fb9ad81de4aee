"""Every dialect shows the same text, reasoning and calls of an answer, whatever form they are in: streamed,
cut anywhere, and whole.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.request import PreparedChat
from kvloom.server.chat.style import form_of
from kvloom.server.chat.tools import Tool, ToolChoice
from kvloom.server.dialects.anthropic.shapes import MessageWriter, Told
from kvloom.server.dialects.ollama.bodies import Asked
from kvloom.server.dialects.ollama.shapes import AnswerWriter, Heading
from kvloom.server.dialects.openai.bodies import ChatBody
from kvloom.server.dialects.openai.writers import ChatWriter
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.responses.shapes import ResponseWriter, response_object
from kvloom.server.dialects.responses.tools import Tools
from kvloom.server.http.job import Writer
from kvloom.server.observe.timing import Timing
from tests.server.chat.test_channels import ATEM
from tests.server.chat.test_forms import FORMS, FRAME, SCHEMA, written
from tests.server.dialects.test_writers import PROMPT, SERVICE, added, generation, message_frames, sse
from tests.support.models.templates import TemplateTokenizer

Shown = tuple[str, str, list[tuple[str, Any]]]  # text, reasoning, calls
HARD = {"a": 'x "q" <b>\n\u00e9 z', "n": 7}
THINKING = "{# <think> </think> #}"
HARMONY = "{# <|channel|> <|message|> tools #}"
JSON = json.dumps(HARD)
ANSWERS: dict[str, tuple[str, str]] = {
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{JSON}<|call|>",
    ),
    "atem": (
        "{# to=self<|message|> tools #}",
        f" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>So.<|eom|>"
        f"<|start|>assistant to=f<|message|>{ATEM.replace('>x<', '>' + HARD['a'] + '<')}<|eom|>",
    ),
}


@cache
def answers() -> dict[str, tuple[str, str]]:
    """A template of each form, and an answer with reasoning, a text and a call as it shows them."""
    found = dict(ANSWERS)
    for name, calls in FORMS.items():
        template = FRAME.format(calls=calls) + THINKING
        found[name] = (
            template,
            "<think>\nHm.\n</think>\n\n" + written(TemplateTokenizer(template), HARD, content="So."),
        )
    return found


@cache
def chat(template: str) -> PreparedChat:
    style = form_of(TemplateTokenizer(template), True)
    return PreparedChat(PROMPT, SamplingParams(), style, (Tool("f", "", SCHEMA),), ToolChoice("auto"), True, False)


# -- a writer of each dialect, and what its frames and its body show


def chat_writer(chat: PreparedChat) -> Writer:
    return ChatWriter(SERVICE, generation(), ChatBody(messages=[]), 0, chat)


def chat_shown(frames: bytes, body: bytes) -> tuple[Shown, Shown]:
    choices = [choice for event in sse(frames) for choice in event["choices"]]
    calls: dict[int, Any] = {}
    for call in [call for choice in choices for call in choice["delta"].pop("tool_calls", [])]:
        calls[call["index"]] = added([calls.get(call["index"], {}), call["function"]])
    message = added([choice["delta"] for choice in choices])
    whole = json.loads(body)["choices"][0]["message"]
    return (
        told(message["content"], message.get("reasoning"), list(calls.values())),
        told(whole["content"], whole.get("reasoning"), [call["function"] for call in whole["tool_calls"]]),
    )


def response_writer(chat: PreparedChat) -> Writer:
    about = response_object("resp_1", 0, "m", ResponsesBody(input=""), is_kept=False)
    return ResponseWriter(about, SERVICE, 2, chat.output(), Tools())


def response_shown(frames: bytes, body: bytes) -> tuple[Shown, Shown]:
    events = sse(frames)

    def pieces(kind: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")

    names = [
        event["item"]["name"]
        for event in events
        if event["type"] == "response.output_item.added" and "name" in event["item"]
    ]
    streamed = [{"name": name, "arguments": pieces("function_call_arguments")} for name in names]
    items = json.loads(body)["output"]
    texts = {item["type"]: item["content"][0]["text"] for item in items if "content" in item}
    calls = [item for item in items if item["type"] == "function_call"]
    return (
        told(pieces("output_text"), pieces("reasoning_text"), streamed),
        told(texts["message"], texts["reasoning"], calls),
    )


def message_writer(chat: PreparedChat) -> Writer:
    return MessageWriter("g", "m", Told(2), chat.output())


def message_shown(frames: bytes, body: bytes) -> tuple[Shown, Shown]:
    def of(message: dict[str, Any]) -> Shown:
        blocks = {block["type"]: block for block in message["content"]}
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        return told(blocks["text"]["text"], blocks["thinking"]["thinking"], calls, "input")

    return of(message_frames(frames)), of(json.loads(body))


def ollama_writer(chat: PreparedChat) -> Writer:
    return AnswerWriter(Heading("chat", "m"), SERVICE, Asked(PROMPT, SamplingParams(), chat.output()), Timing())


def ollama_shown(frames: bytes, body: bytes) -> tuple[Shown, Shown]:
    def of(message: dict[str, Any]) -> Shown:
        return told(message["content"], message["thinking"], [call["function"] for call in message["tool_calls"]])

    streamed = added([json.loads(line)["message"] for line in frames.splitlines()])
    return of(streamed), of(json.loads(body)["message"])


def told(text: str, reasoning: str | None, calls: Sequence[dict[str, Any]], name: str = "arguments") -> Shown:
    found = [(call["name"], call[name]) for call in calls]
    return text, reasoning or "", [(each, json.loads(one) if isinstance(one, str) else one) for each, one in found]


Made = tuple[Callable[[PreparedChat], Writer], Callable[[bytes, bytes], tuple[Shown, Shown]]]
DIALECTS: dict[str, Made] = {
    "chat": (chat_writer, chat_shown),
    "responses": (response_writer, response_shown),
    "messages": (message_writer, message_shown),
    "ollama": (ollama_writer, ollama_shown),
}


def deltas(text: str, size: int) -> list[Delta]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(Delta("r", piece, (65,)) for piece in pieces), Delta("r", finish_reason=FinishReason.EOS)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", [*ANSWERS, *FORMS])
def test_a_dialect_shows_what_the_model_wrote(form: str, dialect: str):
    template, text = answers()[form]
    make, shown = DIALECTS[dialect]
    wanted = ("So.", "Hm.", [("f", {"a": HARD["a"]} if form == "atem" else HARD)])
    for size in (1, 3, 7, 1000):
        streaming, folding = make(chat(template)), make(chat(template))
        frames = b"".join(streaming.add(0, delta) for delta in deltas(text, size)) + streaming.end()
        for delta in deltas(text, size):
            folding.fold(0, delta)
        assert shown(frames, folding.whole().body) == (wanted, wanted), size


@pytest.mark.parametrize("form", [*ANSWERS, *FORMS])
def test_wherever_an_answer_is_cut_its_calls_are_JSON(form: str):
    template, text = answers()[form]
    for end in range(0, len(text), 3):
        for reason in (FinishReason.LENGTH, FinishReason.EOS):
            output: ChatOutput = chat(template).output()
            events = output.add(Delta("r", text[:end], (65,)))
            events += output.add(Delta("r", finish_reason=reason))
            arguments: dict[int, str] = {}
            for event in events:
                if hasattr(event, "index"):
                    arguments[event.index] = arguments.get(event.index, "") + getattr(event, "text", "")
            assert all(isinstance(json.loads(one), dict) for one in arguments.values()), (text[:end], reason)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", FORMS)
def test_half_a_mark_at_the_end_of_a_cut_answer_is_no_text_in_any_dialect(form: str, dialect: str):
    template, text = answers()[form]
    begin = text.index(chat(template).style.calls.opening)
    make, _ = DIALECTS[dialect]
    for end in range(begin + 2, begin + len(chat(template).style.calls.opening)):
        for size in (1, 1000):
            streaming, folding = make(chat(template)), make(chat(template))
            cut = [*deltas(text[:end], size)[:-1], Delta("r", finish_reason=FinishReason.LENGTH)]
            frames = b"".join(streaming.add(0, delta) for delta in cut) + streaming.end()
            for delta in cut:
                folding.fold(0, delta)
            body = folding.whole().body
            assert b"So." in (frames if size > 1 else body)
            assert b"So." in body
            assert text[begin:end].encode() not in frames + body
            assert b'"' + text[begin : begin + 1].encode() + b'"' not in frames
