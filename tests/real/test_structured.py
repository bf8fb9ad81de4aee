"""Structured output of the real model: every sample matches its schema; other requests in the batch are unaffected."""

import json
from collections.abc import Callable

import pytest
from jsonschema_rs import validate

from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.grammars import json_grammar
from tests.real.model import RealModel
from tests.support.engine.engines import run_all, text_of, tokens_of

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "population", "coastal"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name a city, its population and whether it lies at the sea, as JSON."}]


def test_every_sample_is_of_the_schema_and_the_others_do_not_notice(real: Callable[[str], RealModel]):
    model = real("cpu, bf16")
    tokenizer = model.tokenizer
    ids = tuple(tokenizer.encode(tokenizer.apply_chat_template(QUESTION), add_special_tokens=False))
    grammar = json_grammar(SCHEMA, "schema")
    plain = Request("plain", ids, SamplingParams(temperature=0, max_tokens=24))
    alone = run_all(model.engine(), plain)
    guided = [
        Request(f"g{seed}", ids, SamplingParams(temperature=1.0, seed=seed, max_tokens=120, grammar=grammar))
        for seed in range(6)
    ]
    found = run_all(model.engine(), plain, *guided)
    assert tokens_of(found["plain"]) == tokens_of(alone["plain"])
    for request in guided:
        if found[request.id][-1].finish_reason is not FinishReason.LENGTH:
            validate(SCHEMA, json.loads(text_of(found[request.id])))
    assert any(found[request.id][-1].finish_reason is FinishReason.EOS for request in guided)
