"""Streams that send several tokens together: the same frames as one by one, in fewer pieces; every token is timed."""

import itertools
import re
import time

import httpx
import pytest

from kvloom.server.http import sse
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import WAIT_S

NUM_TOKENS = 18
STEP_S = 0.02
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM_TOKENS}
STREAMS = {
    "/v1/chat/completions": {**CHAT, "stream": True, "logprobs": True},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": NUM_TOKENS, "n": 3, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": NUM_TOKENS, "stream": True},
    "/v1/messages": {**CHAT, "stream": True},
    "/api/chat": {"model": MODEL, "messages": CHAT["messages"], "options": {"num_predict": NUM_TOKENS}},
    "/generate": {"prompt": "hi", "max_tokens": NUM_TOKENS, "stream": True},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": NUM_TOKENS}},
    f"/v2/models/{MODEL}/generate_stream": {"text_input": "hi", "parameters": {"max_new_tokens": NUM_TOKENS}},
}
# what differs from request to request: ids, times and durations
VARYING = re.compile(
    r'"(id|item_id|created|created_at|completed_at|\w*duration|\w*_id|\w*time\w*)": ?("[^"]*"|[\d.]+)'
    r"|(chatcmpl|cmpl|resp|msg|rs|fc)[-_][0-9a-f]+"
)


def frames(server: FakeServer, path: str) -> str:
    return VARYING.sub("", server.post(path, STREAMS[path]).text)


@pytest.mark.parametrize("path", STREAMS)
def test_the_frames_are_those_of_a_stream_that_sends_each_token(path: str):
    found = []
    for interval in (1, 5, 1000):
        with fake_server(has_eos=False, card={"stream_interval": interval}) as server:
            found.append(frames(server, path))
    if path == "/v1/completions":  # which of several choices is written first depends on the steps
        found = ["\n".join(sorted(text.split("\n\n"))) for text in found]
    assert found[0] == found[1] == found[2]


def arrivals(server: FakeServer) -> list[int]:
    """The number of tokens in each piece of a stream."""
    found = []
    with httpx.stream(
        "POST", f"{server.url}/generate_stream", json=STREAMS["/generate_stream"], timeout=WAIT_S
    ) as answer:
        for piece in answer.iter_raw():
            found.append(piece.count(b"data:"))
    return found


def test_the_first_token_comes_alone_and_the_others_in_groups():
    with fake_server(has_eos=False, step_s=STEP_S, card={"stream_interval": 5}) as server:
        come = list(itertools.accumulate(arrivals(server)))
    assert come[-1] == NUM_TOKENS
    assert len(come) > 1
    assert set(come) <= {1, 6, 11, 16, NUM_TOKENS}, "a reader that is late gets several groups as one piece"


def test_a_silent_stream_sends_what_it_has_before_a_comment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    with fake_server(has_eos=False, step_s=0.1, card={"stream_interval": 1000}) as server:
        text = server.post("/generate_stream", STREAMS["/generate_stream"]).text
    assert text.count("data:") == NUM_TOKENS
    assert text.index(": keep-alive") < text.rindex("data:")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_every_token_is_timed_when_it_comes(is_streamed: bool):
    """Though a stream sends them together, and a whole answer is told of several at once."""
    with fake_server(has_eos=False, step_s=STEP_S, card={"stream_interval": 1000}) as server:
        began_s = time.perf_counter()
        server.post("/v1/chat/completions", {**CHAT, "stream": is_streamed})
        whole_s = time.perf_counter() - began_s
        lines = httpx.get(f"{server.url}/metrics").text
    (count,) = re.findall(r"^vllm:inter_token_latency_seconds_count{.*} (\S+)$", lines, re.MULTILINE)
    (total_s,) = re.findall(r"^vllm:inter_token_latency_seconds_sum{.*} (\S+)$", lines, re.MULTILINE)
    (num_short,) = re.findall(r'^vllm:inter_token_latency_seconds_bucket{.*le="0.001",.*} (\S+)$', lines, re.MULTILINE)
    (first_s,) = re.findall(r"^vllm:time_to_first_token_seconds_sum{.*} (\S+)$", lines, re.MULTILINE)
    assert float(count) == NUM_TOKENS - 1
    assert float(total_s) >= (NUM_TOKENS - 1) * STEP_S * 0.9
    assert float(first_s) + float(total_s) <= whole_s
    assert float(num_short) < NUM_TOKENS / 2, "timed together, all gaps but one would be nothing"
