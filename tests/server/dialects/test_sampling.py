"""A sampling parameter for which a body has a field reaches the engine, whatever the protocol calls it."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import OFF, ROWS, SamplingParams
from kvloom.server.dialects import parameters
from kvloom.server.dialects.anthropic.bodies import MessagesBody
from kvloom.server.dialects.ollama.options import NAMED, Options
from kvloom.server.dialects.openai.bodies import ChatBody, CompletionBody
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.sampling import Named
from kvloom.server.dialects.vllm.generate import PromptBody

MESSAGES = [{"role": "user", "content": "hi"}]
# name -> (body, its required fields, its SamplingParams)
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any], Callable[[Any], SamplingParams]]] = {
    "chat": (ChatBody, {"messages": MESSAGES}, lambda body: body.params(16)),
    "completions": (CompletionBody, {"prompt": "hi"}, lambda body: body.params()),
    "responses": (ResponsesBody, {"input": "hi"}, lambda body: body.params(16)),
    "messages": (MessagesBody, {"messages": MESSAGES, "max_tokens": 16}, lambda body: body.params()),
    "ollama": (Options, {}, lambda body: body.sampling(64, None, "")),
    "tgi": (parameters.Parameters, {}, lambda body: parameters._sampling(body, parameters.TGI, 16, False)),
    "vllm": (PromptBody, {"prompt": "hi"}, lambda body: body.sampling(16)),
}
NAMES = {body: (NAMED if type_ is Options else Named(type_)).names for body, (type_, _, _) in BODIES.items()}
FIELDS = [(body, name) for body, names in NAMES.items() for name in names]


def other(name: str) -> Any:
    """A value that the parameter may have, other than its default."""
    row, off = ROWS[name], OFF[name]
    if isinstance(off, bool):
        return not off
    if off == ():
        return [1, 2]
    return 0.25 if isinstance(off, float) else int(row.least) + 7 if row.least >= 0 else 7


@pytest.mark.parametrize(("body", "name"), FIELDS, ids=lambda value: str(value))
def test_a_parameter_that_a_body_has_reaches_the_engine(body, name):
    type_, required, params_of = BODIES[body]
    value = other(name)
    found = getattr(params_of(msgspec.convert({**required, NAMES[body][name]: value}, type_)), name)
    assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("body", BODIES)
def test_null_is_as_if_it_were_not_given(body):
    type_, required, params_of = BODIES[body]
    nulls = dict.fromkeys(NAMES[body].values())
    assert params_of(msgspec.convert(required | nulls, type_)) == params_of(msgspec.convert(required, type_))


@pytest.mark.parametrize("name", Named(PromptBody).of_kinds(("shapes", "cuts")))
def test_a_beam_search_goes_with_nothing_that_changes_probabilities(name):
    asked = {"prompt": "hi", "use_beam_search": True, "best_of": 2, "temperature": 0}
    assert msgspec.convert(asked, PromptBody).beams() is not None
    with pytest.raises(BadRequest) as caught:
        msgspec.convert(asked | {name: other(name)}, PromptBody).beams()
    assert caught.value.field == name
