"""4.0 is an integer in JSON; 4.5 and "4" are none. In every dialect."""

from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from kvloom.contract.json_numbers import converted, decoded
from tests.support.servers import FakeServer


class _Inner(msgspec.Struct):
    n: int = 0
    ids: list[int] = []


class _Body(msgspec.Struct):
    a: Annotated[int, Meta(ge=0, le=10)] | None = None
    prompt: str | list[str | int | list[int]] = ""
    bias: dict[str, int] = {}
    inner: list[_Inner] = []
    share: float | None = None
    free: Any = None
    flag: bool = False


_DECODER = msgspec.json.Decoder(_Body)
READ: list[tuple[str, _Body]] = [
    ('{"a": 4.0}', _Body(a=4)),
    ('{"a": 4e0}', _Body(a=4)),
    ('{"a": -0.0}', _Body(a=0)),
    ('{"prompt": [1.0, 2, 3.0]}', _Body(prompt=[1, 2, 3])),
    ('{"prompt": [[1.0], [2.0]]}', _Body(prompt=[[1], [2]])),
    ('{"bias": {"7": 1.0, "8": 2.0}}', _Body(bias={"7": 1, "8": 2})),
    ('{"inner": [{}, {"n": 3.0, "ids": [1.0]}]}', _Body(inner=[_Inner(), _Inner(3, [1])])),
    ('{"a": 4.0, "share": 1.0, "free": {"const": 4.0}}', _Body(a=4, share=1.0, free={"const": 4.0})),
    ('{"a": 4.0, "free": 123456789012345678901234567890}', _Body(a=4, free=123456789012345678901234567890)),
]


@pytest.mark.parametrize(("text", "body"), READ)
def test_a_number_without_a_fraction_is_an_integer(text: str, body: _Body):
    read = decoded(_DECODER, text.encode())
    assert read == body
    assert str(read) == str(body), "also their types"
    assert str(converted(msgspec.json.decode(text), _Body)) == str(body)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 4.5}', "got `float` - at `$.a`"),
        ('{"a": "4"}', "got `str` - at `$.a`"),
        ('{"a": 11.0}', "<= 10 - at `$.a`"),
        ('{"a": 4.0, "prompt": [1.5]}', "got `float` - at `$.prompt[0]`"),
        ('{"a": 1e300}', "at `$.a`"),
        ('{"flag": 1.0}', "got `float` - at `$.flag`"),
        ('{"inner": [{"n": {}}], "a": 1.0}', "got `object`"),
    ],
)
def test_others_are_refused_by_their_place(text: str, problem: str):
    with pytest.raises(msgspec.ValidationError) as raised:
        decoded(_DECODER, text.encode())
    assert problem in str(raised.value)


@given(st.lists(st.lists(st.integers(0, 9).map(float), min_size=1), max_size=20))
def test_many_numbers_are_read(ids: list[list[float]]):
    assert decoded(_DECODER, msgspec.json.encode({"prompt": ids})).prompt == ids


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TAKEN = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 4.0, "top_k": 5.0, "seed": 7.0, "n": 1.0}),
    ("/v1/completions", {"prompt": [104.0, 105.0], "max_tokens": 4.0}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4.0}),
    ("/v1/messages", {**CHAT, "max_tokens": 4.0, "top_k": 5.0}),
    ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 4.0, "top_k": 5.0, "seed": 7.0}}),
    ("/generate", {"prompt": "hi", "max_tokens": 4.0}),
    ("/infer", {"inputs": "hi", "parameters": {"max_new_tokens": 4.0}}),
    ("/infer_token", {"input_id": [104.0, 105.0], "parameters": {"max_new_tokens": 4.0}}),
    ("/v2/models/mock/generate", {"text_input": "hi", "parameters": {"max_new_tokens": 4.0}}),
    (
        "/v2/models/mock/infer",
        {
            "inputs": [{"name": "a", "shape": [2.0], "datatype": "INT64", "data": [104.0, 105.0]}],
            "parameters": {"max_new_tokens": 4.0},
        },
    ),
    ("/api/generate", {"model": "mock", "prompt": "hi", "stream": False, "options": {"num_predict": 4.0}}),
    ("/api/chat", {"model": "mock", **CHAT, "stream": False, "logprobs": True, "top_logprobs": 1.0}),
    ("/v1/embeddings", {"input": [[104.0, 105.0]]}),
    ("/detokenize", {"tokens": [104.0, 105.0]}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN, ids=[f"{i}-{path}" for i, (path, _) in enumerate(TAKEN)])
def test_every_dialect_takes_them(server: FakeServer, path: str, body: dict[str, Any]):
    response = server.post(path, body)
    assert response.status_code == 200, response.text
