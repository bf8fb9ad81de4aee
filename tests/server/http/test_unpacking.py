"""Compressed bodies: decompressed however they are split, up to the limit; other encodings are refused with a list."""

import gzip
import json
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest
from kvloom.server.errors import WrongEncoding
from kvloom.server.http.unpacking import Unpacker
from tests.support.servers import FakeServer, fake_server

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKED = {
    "gzip": (gzip.compress(BODY, mtime=0), "gzip"),
    "x-gzip": (gzip.compress(BODY, mtime=0), "X-GZip"),
    "members": (gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]), "gzip"),
    "zlib": (zlib.compress(BODY), "deflate"),
    "raw": (raw_deflate(BODY), "deflate"),
}


def unpacked(coding: str, *pieces: bytes) -> bytes:
    unpacker = Unpacker(coding)
    found = [part for piece in pieces for part in unpacker.feed(piece)]
    unpacker.finish()
    return b"".join(found)


@given(st.sampled_from(sorted(PACKED)), st.lists(st.integers(0, 80), max_size=6))
def test_pieces_make_no_difference(name: str, cuts: list[int]):
    data, coding = PACKED[name]
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(edges)]
    assert unpacked(coding, *pieces) == BODY


def test_a_bomb_comes_in_small_pieces():
    bomb = gzip.compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    assert max(map(len, Unpacker("gzip").feed(bomb))) <= 1 << 18


@pytest.mark.parametrize(
    ("coding", "data", "problem"),
    [
        ("gzip", BODY, "incorrect header"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-3], "ends before its end"),
        ("gzip", b"\x1f", "ends before its end"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", "incorrect header"),
        ("deflate", zlib.compress(BODY) + b"more", "goes on"),
        ("deflate", zlib.compress(BODY)[:-1] + b"!", "incorrect data check"),
    ],
)
def test_what_is_damaged_says_so(coding: str, data: bytes, problem: str):
    with pytest.raises(BadRequest, match=problem):
        unpacked(coding, data)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x" * 500])
def test_other_codings_are_refused(coding: str):
    with pytest.raises(WrongEncoding, match="send gzip, deflate or none"):
        Unpacker(coding)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_every_route_takes_packed_bodies(server: FakeServer, route: str, name: str):
    data, coding = PACKED[name]
    assert server.client.post(route, content=data, headers={"content-encoding": coding}).status_code == 200
    assert server.client.post(route, content=BODY, headers={"content-encoding": "identity"}).status_code == 200


def test_what_is_not_understood_is_a_415_that_says_what_is(server: FakeServer):
    for route in ("/v1/completions", "/generate"):
        response = server.client.post(route, content=BODY, headers={"content-encoding": "br"})
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, deflate")
        assert "'br'" in response.text


@pytest.mark.parametrize("num_bytes", [1 << 20, (1 << 20) + 1, 50_000_000])
def test_the_limit_is_of_the_unpacked_body(num_bytes: int):
    body = BODY + b" " * (num_bytes - len(BODY))
    with fake_server(max_body_bytes=1 << 20) as server:
        response = server.client.post(
            "/v1/completions", content=gzip.compress(body), headers={"content-encoding": "gzip"}
        )
        assert response.status_code == (200 if num_bytes == 1 << 20 else 413)
