"""Numbers in texts are plain decimal digits: no sign, blank, underscore or digit of another script."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest
from kvloom.contract.numbers import whole
from kvloom.gewu.codes import Refused
from kvloom.gewu.protocol import schema
from kvloom.pool.config import parse_address, parse_count, parse_group, parse_size
from kvloom.tuning.dataset import read_rows
from tests.support.servers import MODEL, FakeServer, fake_server

OTHERS = ["", "٣", "１２", "²", "1_0", "+5", " 5", "5 ", "5\n", "0x5", "1e1", "1" * 5000, "000000001" * 600]
IDS = [ascii(text)[:16] for text in OTHERS]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@given(st.integers(0, 2**63 - 1))
def test_plain_digits_are_a_number(number):
    assert whole(str(number)) == number
    assert whole(f"0{number}", most=number) == number
    assert whole(str(number + 1), most=number) is None


@pytest.mark.parametrize("text", OTHERS, ids=IDS)
def test_nothing_else_is(text):
    assert whole(text) is None


@pytest.fixture(scope="module")
def server():
    with fake_server() as running:
        yield running


@pytest.mark.parametrize("text", OTHERS, ids=IDS)
def test_not_in_urls_either(server: FakeServer, text: str):
    timed = server.client.get(f"/health/timed-{quote(text)}")
    assert "Wait time should be in range of [1, 600]" in timed.text or (text, timed.status_code) == ("", 404)
    listed = server.client.get(f"/v1/models?limit={quote(text)}", headers=ANTHROPIC)
    assert (listed.status_code, "limit: must be between 1 and 1000" in listed.text) == (400, True)


@pytest.mark.parametrize("text", OTHERS, ids=IDS)
def test_not_in_bodies_either(server: FakeServer, text: str):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logit_bias": {text: 1}}
    answer = server.post("/v1/chat/completions", chat)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "logit_bias: its keys must be token ids")
    answer = server.post("/api/chat", {"model": MODEL, "messages": chat["messages"], "keep_alive": f"{text}٣s"})
    assert answer.json()["error"].startswith("keep_alive: must be a duration")


@pytest.mark.parametrize("text", OTHERS, ids=IDS)
def test_not_in_options_and_files_either(tmp_path, text):
    for parse in (parse_size, parse_count, parse_group, lambda text: parse_address(f"host:{text}")):
        with pytest.raises(ValueError, match=r"must be|a size is|no group|host:port"):
            parse(text)
    with pytest.raises(Refused, match="must be an integer"):
        schema._integer("max_tokens", text, 0)
    if text.strip().isdecimal() and text.isascii() and len(text) < 9:
        return  # a file may have blanks around a token id
    (tmp_path / "rows.csv").write_text(f"1,{text}\n", encoding="utf-8")
    with pytest.raises(BadRequest, match="must be token ids"):
        read_rows(tmp_path / "rows.csv")
