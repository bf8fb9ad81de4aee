"""Requests to /v1/responses of the mock model, and what it answers."""

import json
from typing import Any

import httpx

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, fake_answer
from tests.support.servers import MODEL, FakeServer

PATH = "/v1/responses"
GREEDY = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_output_tokens": 8}


def truth(*messages: tuple[str, str], count: int = 8) -> str:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages])
    return tokenizer.decode(fake_answer(tokenizer.encode(prompt), SamplingParams(temperature=0), 0, count))


def respond(server: FakeServer, input: Any, **fields: Any) -> Any:
    response = server.post(PATH, {**GREEDY, "input": input, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    return json.loads(response.text.split("\n\n")[-2].split("\ndata: ")[1])["response"]


def text_of(response: Any) -> str:
    return response["output"][0]["content"][0]["text"]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error
