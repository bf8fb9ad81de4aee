"""Streamed = whole, for every Writer: the frames of any deltas contain what the whole answer of the same deltas
contains.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Delta, FinishReason, TokenLogprob
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer
from kvloom.server.chat.form import HERMES, THINK, ChatForm
from kvloom.server.chat.request import PreparedChat
from kvloom.server.chat.tools import Tool, ToolChoice
from kvloom.server.dialects.anthropic.shapes import MessageWriter, Told
from kvloom.server.dialects.ollama.bodies import Asked
from kvloom.server.dialects.ollama.shapes import AnswerWriter, Heading
from kvloom.server.dialects.openai.bodies import ChatBody, CompletionBody, StreamOptions
from kvloom.server.dialects.openai.writers import ChatWriter, TextWriter
from kvloom.server.dialects.parameters import Parameters
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.responses.shapes import ResponseWriter, response_object
from kvloom.server.dialects.responses.tools import Tools
from kvloom.server.dialects.tgi.native import NativeWriter
from kvloom.server.dialects.tgi.writer import TgiWriter
from kvloom.server.dialects.triton import writers as triton
from kvloom.server.dialects.triton.bodies import Infer
from kvloom.server.dialects.vllm.generate import FullTextWriter, VllmWriter
from kvloom.server.http.job import Writer
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.generation import Generation

Json = dict[str, Any]
Steps = list[tuple[int, Delta]]
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>'
WORDS = ("<think>", "</think>", CALL, CALL[:30], " and ", "é", "\n", "x", "}")
PROMPT = (72, 105)
VARYING = ("id", "call_id", "item_id", "created_at", "total_duration")  # and fields that only one of the two forms has


class Service:
    """The parts of a GenerationService that writers use; a class of a module, so that it can be pickled."""

    name = "m"
    tokenizer = ByteTokenizer()
    card = SimpleNamespace(engine=SimpleNamespace(device="cpu"))
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(num_running=1))

    def __reduce__(self) -> str:
        return "SERVICE"


SERVICE: Any = Service()


# -- deltas


@st.composite
def answers(draw: st.DrawFn, num_choices: int) -> tuple[Steps, Steps]:
    """Deltas of several choices, and the same deltas with the choices interleaved in another way."""
    choices = [draw(deltas(index)) for index in range(num_choices)]
    order = [index for index, found in enumerate(choices) for _ in found]
    return merged(choices, draw(st.permutations(order))), merged(choices, draw(st.permutations(order)))


def merged(choices: list[list[Delta]], order: list[int]) -> Steps:
    left = [iter(found) for found in choices]
    return [(index, next(left[index])) for index in order]


@st.composite
def deltas(draw: st.DrawFn, index: int) -> list[Delta]:
    """Deltas of one choice: its text cut anywhere, one piece for each token; the last delta may have no text."""
    text = "".join(draw(st.lists(st.sampled_from(WORDS), max_size=6)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    seed, found = draw(st.sampled_from([None, 7])), []
    reason = draw(st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.ERROR]))
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        has_token = not is_last or draw(st.booleans())
        token = draw(st.integers(0, 255))
        found.append(
            Delta(
                f"r{index}",
                piece,
                (token,) if has_token else (),
                (TokenLogprob(token, -0.5 - number, ((token, -0.5), (65, -1.5))),) if has_token else (),
                (None, TokenLogprob(PROMPT[1], -2.0)) if number == 0 else None,
                reason if is_last else None,
                "zz" if is_last and reason is FinishReason.STOP else None,
                num_cached_tokens=2,
                seed=seed,
            )
        )
    return found


# -- writers


def generation(n: int = 1) -> Generation:
    return Generation("g", (PROMPT,), SamplingParams(), n, n)


def chat() -> PreparedChat:
    tools = (Tool("f", parameters={"properties": {"a": {}}}),)
    style = ChatForm(HERMES, THINK, takes_tools=True)
    return PreparedChat(PROMPT, SamplingParams(), style, tools, ToolChoice("auto"), True, False)


USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


def chat_writer() -> Writer:
    options: Json = {"stream_options": USAGE, "logprobs": True, "return_token_ids": True}
    return ChatWriter(SERVICE, generation(2), ChatBody(messages=[], **options), 0, chat())


def text_writer() -> Writer:
    options: Json = {"stream_options": USAGE, "logprobs": 1, "return_token_ids": True, "echo": True}
    asked = Generation("g", (PROMPT, (74, 75)), SamplingParams())  # two prompts: the cached tokens of both count
    return TextWriter(SERVICE, asked, CompletionBody(prompt="", **options), 0)


def response_writer() -> Writer:
    told = response_object("resp_1", 0, "m", ResponsesBody(input=""), is_kept=False)
    return ResponseWriter(told, SERVICE, 2, chat().output(), Tools())


def ollama_writer() -> Writer:
    asked = Asked(PROMPT, SamplingParams(), chat().output(), has_context=True)
    return AnswerWriter(Heading("chat", "m"), SERVICE, asked, Timing())


def tgi_writer() -> Writer:
    params = Parameters(details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=True)
    return TgiWriter(SERVICE, generation(), "Hi", params, Timing())


def triton_writer() -> Writer:
    return triton.TextWriter(SERVICE, generation(), {"id": "g"}, True, Timing())


def infer_writer() -> Writer:
    tensor = {"name": "a", "shape": [2], "datatype": "UINT32", "data": list(PROMPT)}
    asked = Infer(json.dumps({"inputs": [tensor]}).encode(), None)
    return triton.InferWriter(generation(), {"id": "g"}, asked, is_input_echoed=True)


# -- contents of frames and bodies


def sse(frames: bytes) -> list[Json]:
    lines = frames.decode().split("\n")
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def added(parts: list[Json]) -> Json:
    """Two objects merged: texts and lists are concatenated, numbers and null replaced by the later value."""
    found: Json = {}
    for part in parts:
        for name, value in part.items():
            before = found.get(name)
            joined = isinstance(value, str | list) and type(before) is type(value)
            nested = isinstance(value, dict) and isinstance(before, dict)
            if joined:
                found[name] = before + value
            elif nested:
                found[name] = added([before, value])
            elif value is not None or name not in found:
                found[name] = value
    return found


def chat_frames(frames: bytes) -> Json:
    events = sse(frames)
    choices = []
    for index in range(2):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        calls: dict[int, Json] = {}
        for call in [call for part in parts for call in part["delta"].pop("tool_calls", [])]:
            calls[call["index"]] = added([calls.get(call["index"], {}), call["function"]])
        told = added([{name: part[name] for name in ("logprobs", "finish_reason")} for part in parts])
        if told["logprobs"]:
            told["logprobs"].pop("refusal")
        message = added([part["delta"] for part in parts])
        rest = {"token_ids": list(chain.from_iterable(part.get("token_ids", []) for part in parts))}
        rest["stop_reason"] = parts[-1]["stop_reason"]
        choices.append({**told, **rest, "message": message, "calls": [calls[i] for i in sorted(calls)]})
    return {"choices": choices, "usage": events[-1]["usage"], "prompt_token_ids": events[0]["prompt_token_ids"]}


def chat_body(body: bytes) -> Json:
    whole = json.loads(body)
    for choice in whole["choices"]:
        message = choice["message"]
        del message["refusal"], choice["index"]
        choice["calls"] = [call["function"] for call in message.pop("tool_calls", [])]
        message["content"] = message["content"] or ""
        if choice["logprobs"]:
            choice["logprobs"].pop("refusal")
        if choice["logprobs"] == {"content": []}:
            choice["logprobs"] = None  # a stream does not mention an empty list
    return {name: whole[name] for name in ("choices", "usage", "prompt_token_ids")}


def text_frames(frames: bytes) -> Json:
    events = sse(frames)
    choices = []
    for index in range(2):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        choices.append(added([{name: part[name] for name in part if name != "index"} for part in parts]))
    return {"choices": choices, "usage": events[-1]["usage"]}


def text_body(body: bytes) -> Json:
    whole = json.loads(body)
    for choice in whole["choices"]:
        del choice["index"]
    return {name: whole[name] for name in ("choices", "usage")}


def message_frames(frames: bytes) -> Json:
    """The message, assembled as Anthropic's clients do it."""
    message: Json = {}
    for event in sse(frames):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                arguments += delta.get("partial_json", "")
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] += delta[name]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = object_of(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def object_of(text: str) -> Json:
    try:
        found: Json = json.loads(text)
    except ValueError:
        return {}
    return found


def response_frames(frames: bytes) -> Json:
    """The response in the last event, which must agree with the events before it."""
    events = sse(frames)
    output: Json = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for index, item in enumerate(output["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert mine[-1]["item"] == item
    return output


def ollama_frames(frames: bytes) -> Json:
    lines = [json.loads(line) for line in frames.splitlines()]
    message = added([line.pop("message") for line in lines])
    logprobs = list(chain.from_iterable(line.pop("logprobs", []) for line in lines))
    return {**lines[-1], "message": {**message, "role": "assistant"}, **({"logprobs": logprobs} if logprobs else {})}


def tgi_frames(frames: bytes) -> Json:
    events = sse(frames)
    tokens = [event["token"] for event in events]
    if events[-1]["details"]["generated_tokens"] < len(tokens):
        tokens.pop()  # the usage of the last event, which is absent
    tops = [event["top_tokens"] for event in events if "top_tokens" in event]
    details = {**events[-1]["details"], "tokens": tokens, "top_tokens": tops}
    return {"generated_text": events[-1]["generated_text"], "details": details}


def native_frames(frames: bytes) -> Json:
    *events, last = sse(frames)
    assert last["generated_text"].startswith("".join(event["token"]["text"] for event in events))
    return {"generated_text": last["generated_text"], "details": last["details"]}


def vllm_frames(frames: bytes) -> Json:
    told = [json.loads(frame)["text"] for frame in frames.split(b"\0")[:-1]]
    return {"text": ["Hi" + "".join(texts[i] for texts in told) for i in range(2)]}


def full_frames(frames: bytes) -> Json:
    told: Json = json.loads(frames.split(b"\0")[-2])
    return told


def triton_frames(frames: bytes) -> Json:
    events = sse(frames)
    return {**events[-1], "text_output": "".join(event["text_output"] for event in events)}


@dataclass(frozen=True, slots=True)
class Case:
    writer: Callable[[], Writer]
    frames: Callable[[bytes], Json]
    body: Callable[[bytes], Json] = json.loads
    num_choices: int = 1


CASES = {
    "chat": Case(chat_writer, chat_frames, chat_body, 2),
    "completion": Case(text_writer, text_frames, text_body, 2),
    "message": Case(lambda: MessageWriter("g", "m", Told(2), chat().output()), message_frames),
    "response": Case(response_writer, response_frames),
    "ollama": Case(ollama_writer, ollama_frames),
    "tgi": Case(tgi_writer, tgi_frames),
    "native": Case(lambda: NativeWriter(generation(), has_details=True), native_frames),
    "vllm": Case(lambda: VllmWriter(generation(2), "Hi"), vllm_frames, num_choices=2),
    "vllm, full text": Case(lambda: FullTextWriter(generation(2), "Hi"), full_frames, num_choices=2),
    "triton": Case(triton_writer, triton_frames),
    "infer": Case(infer_writer, json.loads),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@given(data=st.data())
def test_a_stream_says_what_the_whole_answer_says(case: Case, data: st.DataObject):
    streamed, folded = data.draw(answers(case.num_choices))
    writer: Writer = pickle.loads(pickle.dumps(case.writer()))
    frames = b"".join([writer.add(choice, delta) for choice, delta in streamed]) + writer.end()
    other = case.writer()
    for choice, delta in folded:
        other.fold(choice, delta)
    assert fixed(case.frames(frames)) == fixed(case.body(other.whole().body))


def fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: fixed(item) for name, item in value.items() if name not in VARYING}
    return [fixed(item) for item in value] if isinstance(value, list) else value


def test_of_several_answers_the_likeliest_a_token_is_given():
    """Likeliest by the mean log-probability of a token; by the sum the shorter answer would mostly win."""
    asked = Generation("g", (PROMPT,), SamplingParams(), 1, 2)
    writer = VllmWriter(asked, "")
    for choice, (text, logprobs) in enumerate([("a", (-1.0,)), ("bbb", (-0.5, -0.6, -0.7))]):
        tokens = tuple(TokenLogprob(65, value) for value in logprobs)
        writer.fold(choice, Delta("", text, (65,) * len(tokens), tokens, finish_reason=FinishReason.EOS))
    assert json.loads(writer.whole().body) == {"text": ["bbb"]}
