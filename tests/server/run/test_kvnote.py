"""What the server logs about a model's KV cache at startup."""

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import RankInfo
from kvloom.server.run.kvnote import advice_note, form_note, kv_note, weights_note
from kvloom.server.serving.card import ModelCard
from tests.support.models.templates import HERMES, TemplateTokenizer


@pytest.mark.parametrize(
    ("kv_bytes", "fields", "size", "rest"),
    [
        (2 << 30, {}, "2.0 GB", "; 16 MB of it are taken now, {more}; it goes back after 300 s without work"),
        (2 << 30, {"idle_release_s": 0}, "2.0 GB", "; 16 MB of it are taken now, {more}"),
        (
            3 << 20,
            {"idle_release_s": 5},
            "3 MB",
            "; 3 MB of it are taken now, more when sequences need it; it goes back after 5 s without work",
        ),
        (40 << 30, {"device": "cuda"}, "40.0 GB", ""),
    ],
)
def test_it_tells_what_may_be_taken_and_what_is(kv_bytes, fields, size, rest):
    info = RankInfo(5000, 16, 100, 100, "cpu", kv_bytes=kv_bytes)
    rest = rest.format(more="more when sequences need it and up to 512 MB more for them while nobody asks")
    note = kv_note("m", info, EngineConfig(model="m", **fields))
    assert note == f"m: room for 80,000 tokens in a KV cache of {size}{rest}.\n"


def test_it_tells_what_tokens_take_where_layers_with_a_window_have_blocks_of_their_own():
    """A block of all tokens has 1 MB, one of a window's 4 MB."""
    sizes = {"kv_bytes": 5000 << 20, "window_bytes": 1000 << 20, "num_window_blocks": 250, "reach": 1136}
    info = RankInfo(4000, 16, 100, 100, "cpu", **sizes)
    note = kv_note("m", info, EngineConfig(model="m", device="cuda"))
    assert note == (
        "m: room for 64,000 tokens in a KV cache of 4.9 GB, and of 4,000 tokens in layers with a window; "
        "a thousand tokens take 62 MB, and the window of a sequence up to 288 MB.\n"
    )


def test_a_mock_has_none():
    assert kv_note("m", RankInfo(5000, 16, 100, 100, "fake"), EngineConfig(backend="fake")) == ""


def test_it_tells_how_the_weights_are_kept():
    info = RankInfo(
        5000, 16, 100, 100, "cpu", weight_bytes=105 << 20, held_as="as the file has them (210 in 4 bits, 1 in 8 bits)"
    )
    assert weights_note("m", info) == "m: weights as the file has them (210 in 4 bits, 1 in 8 bits), 105 MB.\n"
    assert weights_note("m", RankInfo(5000, 16, 100, 100, "fake")) == ""


def test_it_tells_what_a_draft_model_takes():
    drafts = 98 << 20, 5000 * 16 * 12 * 1024
    info = RankInfo(5000, 16, 100, 100, "cpu", weight_bytes=105 << 20, held_as="in 8 bits", draft_bytes=drafts)
    assert weights_note("m", info).splitlines()[1] == "m: draft model: 98 MB weights, 12 KB a token."


def test_it_tells_how_it_is_sampled_where_requests_do_not_say():
    note = advice_note("m", {"temperature": 0.6, "top_k": 20})
    assert note == "m: where a request does not say, temperature 0.6, top_k 20, as its files advise.\n"
    assert advice_note("m", {}) == ""


@pytest.mark.parametrize(
    ("template", "tool_parser", "note"),
    [
        ("", "auto", ""),
        (HERMES, "auto", "m: calls: hermes, from the template; reasoning: none.\n"),
        (
            HERMES,
            "gpt-oss",
            "m: calls: harmony, from the configuration; reasoning: <|channel|>analysis<|message|>...<|end|>.\n",
        ),
        ("{# tools <think> </think> #}", "auto", "m: calls: hermes, from a guess; reasoning: <think>...</think>.\n"),
    ],
)
def test_the_form_of_calls_is_told_and_how_it_was_found(template: str, tool_parser: str, note: str):
    card = ModelCard("m", EngineConfig(backend="fake"), tool_parser=tool_parser)
    assert form_note(card, TemplateTokenizer(template)) == note
