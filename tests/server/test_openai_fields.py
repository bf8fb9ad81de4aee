"""Fields of OpenAI's and vLLM's requests, one by one: each has its effect, or is refused by name."""

from typing import Any

import pytest

from tests.support.servers import FakeServer


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("use_beam_search", True, False),
        ("length_penalty", 0.8, 1.0),
        ("bad_words", ["a"], []),
        ("allowed_token_ids", [1], []),
        ("logits_processors", ["x"], []),
        ("spaces_between_special_tokens", False, True),
        ("truncate_prompt_tokens", 5, None),
        ("return_tokens_as_token_ids", True, False),
        ("prompt_embeds", "AAAA", None),
        ("kv_transfer_params", {"a": 1}, None),
        ("continue_final_message", True, False),
        ("chat_template", "{{ x }}", None),
        ("documents", [{"text": "a"}], []),
        ("modalities", ["audio"], ["text"]),
        ("audio", {"voice": "a"}, None),
        ("web_search_options", {}, None),
    ],
)
def test_what_is_not_there_is_refused_by_name_and_its_neutral_value_is_not(
    server: FakeServer, field: str, value: Any, neutral: Any
):
    for ask in (server.chat, server.complete):
        refused = ask("hi", max_tokens=1, **{field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert refused.json()["error"]["message"] == f"{field}: is not supported"
        assert ask("hi", max_tokens=1, **{field: neutral}).status_code == 200
