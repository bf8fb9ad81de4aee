"""The soak's requests: every kind whose answer does not depend on time, place or concurrent requests."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL, ADAPTER = "soak", "adapted"
_WORDS = [
    "river", "mountain", "engine", "paper", "window", "garden", "market", "silver", "planet", "winter", "letter",
    "bridge", "forest", "animal", "number", "history", "morning", "shadow", "harbour", "village", "machine", "picture",
]  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_READ_LIMIT_S = 120.0


class Failed(Exception):
    """A request that got no answer. The message is the cause, of few kinds, for counting."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `truth` is its undisturbed answer."""

    kind: str
    path: str
    body: dict[str, Any] = field(hash=False)
    truth: Any = None

    @property
    def may_stream(self) -> bool:
        return self.kind != "embedding"


def make_cases(count: int, seed: int) -> list[Case]:
    """Prompts of 150 to 700 tokens that share a few long beginnings, as conversations do."""
    dice = random.Random(seed)
    prefixes = [_text(dice, 100 + 60 * i) for i in range(5)]
    makers = (_greedy, _chat, _seeded, _structured, _adapted, _embedding, _two)
    return [makers[i % len(makers)](dice, f"{prefixes[dice.randrange(5)]} {_text(dice, 30)}") for i in range(count)]


def ask(client: httpx.Client, case: Case, is_streamed: bool, hang_up_after: int | None = None) -> Any:
    """The answer in the form that `truth` has; None when this client hung up. Raises Failed."""
    try:
        if is_streamed:
            return _streamed(client, case, hang_up_after)
        response = client.post(case.path, json=case.body, timeout=_READ_LIMIT_S)
        _check(response)
        return _whole(case, response.json())
    except httpx.HTTPError as error:
        raise Failed(type(error).__name__) from None


def _text(dice: random.Random, num_words: int) -> str:
    return " ".join(dice.choices(_WORDS, k=num_words))


def _completion(kind: str, prompt: str, **fields: Any) -> Case:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **fields}
    return Case(kind, "/v1/completions", body)


def _greedy(dice: random.Random, prompt: str) -> Case:
    return _completion("greedy", prompt, max_tokens=dice.choice((8, 48, 150)))


def _seeded(dice: random.Random, prompt: str) -> Case:
    return _completion("seeded", prompt, temperature=0.9, top_p=0.9, seed=dice.randrange(10**6))


def _two(dice: random.Random, prompt: str) -> Case:
    return _completion("n=2", prompt, n=2, temperature=0.8, seed=dice.randrange(10**6))


def _adapted(dice: random.Random, prompt: str) -> Case:
    return _completion("adapter", prompt, model=ADAPTER)


def _chat(dice: random.Random, prompt: str, **fields: Any) -> Case:
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "Go on with it."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0, **fields}
    return Case("chat", "/v1/chat/completions", body)


def _structured(dice: random.Random, prompt: str) -> Case:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    return Case("structured", "/v1/chat/completions", _chat(dice, prompt, response_format=form).body)


def _embedding(dice: random.Random, prompt: str) -> Case:
    return Case("embedding", "/v1/embeddings", {"model": MODEL, "input": prompt})


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        body = response.read()
        try:
            cause = _cause(json.loads(body))
        except (ValueError, KeyError, TypeError):
            cause = f"no error object: {body[:60]!r}"
        raise Failed(f"{response.status_code}, {cause}")


def _cause(answer: dict[str, Any]) -> str:
    """An error's message without the parts that vary."""
    message = str(answer["error"]["message"])
    return re.sub(r"\d+", "N", message)[:100]


def _whole(case: Case, answer: dict[str, Any]) -> Any:
    if case.kind == "embedding":
        return answer["data"][0]["embedding"]
    return [[_text_of(choice), choice["finish_reason"]] for choice in answer["choices"]]


def _streamed(client: httpx.Client, case: Case, hang_up_after: int | None) -> Any:
    """Texts and finish reasons of the choices, joined; or the connection is closed after some events."""
    found: dict[int, list[Any]] = {}
    with client.stream("POST", case.path, json={**case.body, "stream": True}, timeout=_READ_LIMIT_S) as response:
        _check(response)
        for number, event in enumerate(_events(response)):
            if number == hang_up_after:
                return None
            for choice in event["choices"]:
                entry = found.setdefault(choice["index"], ["", None])
                entry[0] += _text_of(choice)
                entry[1] = choice["finish_reason"] or entry[1]
    return [found[index] for index in sorted(found)]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises Failed for an error event, and for a stream without its end."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(f"in a stream, {_cause(event)}")
            yield event
    raise Failed("a stream without its end")


def _text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")
