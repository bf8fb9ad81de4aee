"""Tools with the real model, whose template knows none: what must be called is called, read from its own text."""

import json
from pathlib import Path

import pytest
from jsonschema_rs import validate

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.request import FinishReason, Request, SamplingParams
from kvloom.engine.runner import open_runner
from kvloom.engine.tokenizer import load_tokenizer
from kvloom.server.chat_events import ToolCallArguments, ToolCallStart
from kvloom.server.chat_output import ChatOutput
from kvloom.server.tool_calls import make_parser
from kvloom.server.tool_grammars import tool_grammar
from kvloom.server.tool_prompt import with_tools_in_text
from kvloom.server.tools import Tool, ToolChoice
from tests.support.engines import run_all

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


def test_a_required_call_has_arguments_of_its_schema(smollm2_path: Path):
    tokenizer = load_tokenizer(smollm2_path)
    text = tokenizer.apply_chat_template(with_tools_in_text(QUESTION, [TOOL]))
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    config = EngineConfig(model=str(smollm2_path), num_blocks=512)
    runner = open_runner(config, sorted(tokenizer.eos_ids), lambda done, total: None)
    grammar = tool_grammar("hermes", [TOOL], ToolChoice("named", "weather"), False, "")
    requests = [
        Request(f"r{seed}", ids, SamplingParams(temperature=0.7, seed=seed, max_tokens=100, grammar=grammar))
        for seed in range(4)
    ]
    found = run_all(Engine(config, InProcessExecutor(runner), tokenizer), *requests)
    for request in requests:
        output = ChatOutput(None, make_parser("hermes", {"weather": SCHEMA}))
        events = [event for delta in found[request.id] for event in output.add(delta)]
        assert found[request.id][-1].finish_reason is FinishReason.EOS
        assert events[0] == ToolCallStart(0, "weather")
        arguments = "".join(event.text for event in events[1:] if isinstance(event, ToolCallArguments))
        validate(SCHEMA, json.loads(arguments))
