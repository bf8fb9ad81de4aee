"""Tools with the real model, whose template has none: required calls are made and parsed from the model's text."""

import json
from collections.abc import Callable

import pytest
from jsonschema_rs import validate

from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.events import ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import KNOWN
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.tool_calls import make_parser
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tool_prompt import with_tools_in_text
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.real.model import RealModel
from tests.support.engine.engines import run_all

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = Tool("weather", "The weather of a city in the next days.", SCHEMA)
QUESTION = [{"role": "user", "content": "How will the weather be in Paris in the next 3 days?"}]


def test_a_required_call_has_arguments_of_its_schema(real: Callable[[str], RealModel]):
    model = real("cpu, bf16")
    tokenizer = model.tokenizer
    text = tokenizer.apply_chat_template(with_tools_in_text(QUESTION, [TOOL.plain]))
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    grammar = tool_grammar(KNOWN["hermes"], [TOOL], ToolChoice("named", "weather"), False, "")
    requests = [
        Request(f"r{seed}", ids, SamplingParams(temperature=0.7, seed=seed, max_tokens=100, grammar=grammar))
        for seed in range(4)
    ]
    found = run_all(model.engine(), *requests)
    for request in requests:
        output = ChatOutput(None, make_parser(KNOWN["hermes"], {"weather": SCHEMA}))
        events = [event for delta in found[request.id] for event in output.add(delta)]
        assert found[request.id][-1].finish_reason is FinishReason.EOS
        assert events[0] == ToolCallStart(0, "weather")
        arguments = "".join(event.text for event in events[1:] if isinstance(event, ToolCallArguments))
        validate(SCHEMA, json.loads(arguments))
