"""Spec 4.3.1.2: the client against a server of the Triton routes."""

import logging
import subprocess
import sys
from concurrent.futures import Future

import numpy as np
import pytest
from starlette.responses import Response

import mindieclient.httpclient
import mindieclient.python.common.logging
from mindieclient.python.common import Log
from mindieclient.python.httpclient import AsyncRequest, Input, MindIEClientException, MindIEHTTPClient, RequestedOutput
from tests.support.wire.triton import MODEL, FakeTriton, serving


def tokens(*values: int) -> Input:
    tensor = Input("INPUT0", [1, len(values)], "UINT32")
    tensor.initialize_data(np.array([values], dtype=np.uint32))
    return tensor


def test_infer_returns_the_tokens_under_the_requested_name(client):
    result = client.infer(MODEL, [tokens(1, 2, 3)], outputs=[RequestedOutput("OUTPUT0")], request_id="42")
    assert result
    assert result.get_response()["id"] == "42"
    for output in (result.retrieve_output_name_to_numpy("output0"), result.retrieve_output_index_to_numpy(0)):
        assert output.dtype == np.uint32
        assert output.tolist() == [[3, 2, 1]]


def test_parameters_go_into_the_input_where_every_server_reads_them(client, fake):
    client.infer(MODEL, [tokens(1)], parameters={"top_k": np.int64(3), "seed": None, "max_new_tokens": 5})
    assert fake.bodies[0]["inputs"][0]["parameters"] == {"top_k": 3, "max_new_tokens": 5}


def test_async_infer_runs_more_requests_than_it_has_connections(client):
    pending = [client.async_infer(MODEL, [tokens(n, n + 1)]) for n in range(20)]
    answers = [request.get_result(timeout=120).retrieve_output_index_to_numpy(0).tolist() for request in pending]
    assert answers == [[[n + 1, n]] for n in range(20)]


def test_generate_returns_the_text(client):
    assert client.generate(MODEL, "你好").get_response()["text_output"] == "你好!"


def test_generate_stream_yields_strings(client, fake):
    pieces = list(client.generate_stream(MODEL, "hi", request_id="s"))
    assert pieces == fake.pieces


def test_a_failure_inside_a_stream_is_raised_after_the_text_before_it(client, fake):
    fake.pieces = ["a", "FAIL"]
    stream = client.generate_stream(MODEL, "hi")
    assert next(stream) == "a"
    with pytest.raises(MindIEClientException, match="out of luck"):
        next(stream)


def test_a_stream_can_be_cancelled_when_concurrency_is_one(url, fake):
    fake.pieces = ["x" * 10_000] * 100_000
    with MindIEHTTPClient(url) as client:
        stream = client.generate_stream(MODEL, "hi", request_id="long")
        next(stream)
        assert client.cancel(MODEL, "long")
        assert sum(1 for _ in stream) < len(fake.pieces) - 1


def test_cancel_of_an_unknown_request_is_false(client):
    assert not client.cancel(MODEL, "nobody")


def test_status_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "MindIE Server"
    assert client.get_model_metadata(MODEL)["platform"] == "MindIE Server"
    assert client.get_model_metadata(MODEL, "1")["versions"] == ["1"]
    assert client.get_model_config(MODEL)["max_seq_len"] == 2560
    assert client.get_slot_count(MODEL).get_response() == {"total_slots": 50, "free_slots": 50}


def test_the_servers_error_text_reaches_the_caller(client):
    with pytest.raises(MindIEClientException, match="422: token 999 is unknown") as caught:
        client.infer(MODEL, [tokens(999)])
    assert caught.value.get_message() == str(caught.value)


def test_a_server_that_is_gone_is_not_live_and_cannot_answer():
    with serving(FakeTriton().app()) as port:
        pass
    with MindIEHTTPClient(f"http://127.0.0.1:{port}") as client:
        assert not client.is_server_live()
        with pytest.raises(MindIEClientException, match="cannot connect"):
            client.generate(MODEL, "hi")


DEEP = b"[" * 100_000
UNREAD = {
    "brackets": (200, DEEP, {}, "the answer is not JSON"),
    "an error of brackets": (500, DEEP, {}, r"answered 500: \[\["),
    "what is not packed": (200, b"{}", {"Content-Encoding": "gzip"}, "DecodingError"),
}


@pytest.mark.parametrize(("status", "body", "headers", "words"), UNREAD.values(), ids=UNREAD)
def test_an_answer_that_cannot_be_read_is_the_clients_own_error(status, body, headers, words):
    async def app(scope, receive, send):
        await Response(body, status, headers)(scope, receive, send)

    with serving(app) as port, MindIEHTTPClient(f"http://127.0.0.1:{port}") as client:
        for call in (lambda: client.generate(MODEL, "hi").get_response(), client.get_server_metadata):
            with pytest.raises(MindIEClientException, match=words):
                call()


def test_half_a_character_is_not_sent(client):
    for call in (lambda: client.generate(MODEL, "\ud800"), lambda: list(client.generate_stream(MODEL, "\ud800"))):
        with pytest.raises(MindIEClientException, match="cannot be sent: it holds half a character"):
            call()


def test_a_closed_client_says_so(client):
    client.close()
    for call in (lambda: client.generate(MODEL, "x"), lambda: client.async_infer(MODEL, [tokens(1)])):
        with pytest.raises(MindIEClientException, match="closed"):
            call()


def test_valid_url_is_the_url(client, url):
    assert str(client.valid_url) == url


def test_every_import_path_leads_to_the_same_classes():
    assert mindieclient.httpclient.MindIEHTTPClient is MindIEHTTPClient
    assert mindieclient.python.common.logging.Log is mindieclient.httpclient.Log is Log
    assert Log("a.name").getlog().name == "a.name"


@pytest.mark.parametrize(
    "options",
    [
        {"url": "127.0.0.1:1025"},
        {"url": "ftp://127.0.0.1:1025"},
        {"url": "http://127.0.0.1:1025/v2"},
        {"url": "https://127.0.0.1:1025"},  # without enable_ssl
        {"enable_ssl": True},  # with http
        {"url": "https://127.0.0.1:1025", "enable_ssl": True},  # without ssl_options
        {"url": "https://127.0.0.1:1025", "enable_ssl": True, "ssl_options": {"ca_certs": "none.pem"}},
        {"concurrency": 0},
        {"concurrency": 301},
        {"concurrency": 2, "greenlet_size": 3},
        {"greenlet_size": 0},
        {"network_timeout": 0},
        {"connection_timeout": -1.0},
        {"connection_timeout": True},
    ],
)
def test_a_client_with_wrong_arguments_is_refused(options):
    with pytest.raises(MindIEClientException):
        MindIEHTTPClient(**({"url": "http://127.0.0.1:1025"} | options))


@pytest.mark.parametrize("name", ["", "a b", "a//b", "../x", ".x", "模型", "x" * 257, None])
def test_model_names_are_checked(client, name):
    for call in (client.is_model_ready, client.get_slot_count, client.get_model_config):
        with pytest.raises(MindIEClientException, match="model_name"):
            call(name)


@pytest.mark.parametrize(
    "parameters",
    [{"seed": 0}, {"seed": 2**64}, {"temperature": 0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 2**31},
     {"top_p": 0}, {"top_p": 1.1}, {"typical_p": 2}, {"repetition_penalty": 0}, {"do_sample": 1}, {"batch_size": 0},
     {"details": "yes"}, {"top_k": 1.5}, "text"],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(client, parameters, fake):
    with pytest.raises(MindIEClientException, match="parameters"):
        client.generate(MODEL, "hi", parameters=parameters)
    assert fake.bodies == []


@pytest.mark.parametrize("shape", [[2, 3], [1], [1, 0], [1, 16001], [1, 2, 3], "1,2", [1, 2.0], None])
def test_shapes_are_checked(shape):
    with pytest.raises(MindIEClientException, match="shape"):
        Input("INPUT0", shape, "UINT32")


def test_an_input_takes_its_own_kind_of_data():
    tensor = Input("INPUT0", np.array([1, 2]), "UINT32")
    for wrong in (np.array([[1, 2]]), np.array([[1]], dtype=np.uint32), [[1, 2]]):
        with pytest.raises(MindIEClientException, match="input_tensor"):
            tensor.initialize_data(wrong)
    tensor.initialize_data(np.array([[1, 2]], dtype=np.uint32))
    tensor.set_input_shape([1, 3])
    assert tensor.get_input_tensor() is None
    with pytest.raises(MindIEClientException, match="datatype"):
        Input("INPUT0", [1, 2], "INT64")


@pytest.mark.parametrize("inputs", [[], [tokens(1), tokens(2)], None, ["x"], [Input("a", [1, 1], "UINT32")]])
def test_infer_takes_exactly_one_filled_input(client, inputs):
    with pytest.raises(MindIEClientException, match="input"):
        client.infer(MODEL, inputs)


def test_a_verbose_client_shows_its_requests_where_nothing_is_set_up(url):
    program = (
        "from mindieclient.python.httpclient import MindIEHTTPClient\n"
        f"with MindIEHTTPClient({url!r}, verbose=True) as client:\n"
        f"    client.is_server_live()\n    client.generate({MODEL!r}, 'the secret')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert f"GET {url}/v2/health/live -> 200" in done.stderr
    assert f"POST {url}/v2/models/{MODEL}/generate -> 200" in done.stderr
    assert "secret" not in done.stderr
    quiet = program.replace(", verbose=True", "")
    assert not subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True, timeout=120).stderr


def test_a_verbose_client_leaves_a_programs_logging_alone(url, caplog):
    logger = logging.getLogger("mindieclient")
    before = logger.handlers[:]
    with caplog.at_level(logging.INFO), MindIEHTTPClient(url, verbose=True) as client:
        client.is_server_live()
    assert logger.handlers == before
    assert "/v2/health/live -> 200" in caplog.text


def test_typical_p_of_one_is_off_and_not_sent(client, fake):
    client.generate(MODEL, "hi", parameters={"typical_p": 1.0, "top_p": 0.5})
    client.generate(MODEL, "hi", parameters={"typical_p": 0.9})
    assert [body["parameters"] for body in fake.bodies] == [{"top_p": 0.5}, {"typical_p": 0.9}]


@pytest.mark.parametrize("name", ["../v1", "a/../b", "a//b", "/a", "a/", ".a", "a b", ""])
def test_names_that_lead_elsewhere_are_refused(client, name):
    with pytest.raises(MindIEClientException, match="model_name must be 1 to 256 letters"):
        client.is_model_ready(name)


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


HUGE = 10**5000  # more digits than Python prints
LARGE = {"10^400": 10**400, "10^5000": HUGE, "-10^5000": -HUGE, "1e300": 1e300, "2^63": 2**63}


@pytest.mark.parametrize("value", [*LARGE.values(), Unprintable()], ids=[*LARGE, "unprintable"])
@pytest.mark.parametrize("name", ["network_timeout", "connection_timeout", "concurrency", "greenlet_size"])
def test_a_number_that_is_too_large_for_a_clock_is_refused_by_name(name: str, value: object):
    with pytest.raises(MindIEClientException, match=f"{name} must be a"):
        MindIEHTTPClient("http://127.0.0.1:9", **{name: value})


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_a_wait_that_is_too_long_for_a_clock_is_refused(value: float):
    with pytest.raises(MindIEClientException, match="timeout must be a"):
        AsyncRequest(Future()).get_result(value)


@pytest.mark.parametrize("key", ["ключ", "a\nb", "\ud800", 5])
def test_a_key_that_no_header_can_carry_is_refused(key: str):
    with pytest.raises(MindIEClientException, match="api_key must be a string of printable ASCII"):
        MindIEHTTPClient("http://127.0.0.1:9", api_key=key)


@pytest.mark.parametrize("url", ["http://..", "http://a..b", f"http://{'a' * 64}"])
def test_a_host_that_cannot_be_looked_up_is_refused(url: str):
    with pytest.raises(MindIEClientException, match="url names no host"):
        MindIEHTTPClient(url)


RING: list[object] = []
RING.append(RING)


@pytest.mark.parametrize(
    "value", [object(), float("nan"), HUGE, RING, b"bytes"], ids=lambda value: type(value).__name__
)
def test_a_parameter_that_is_no_json_is_refused_before_anything_is_sent(value: object):
    with MindIEHTTPClient("http://127.0.0.1:9") as client:
        for send in (client.generate, client.generate_stream):
            with pytest.raises(MindIEClientException, match="the parameters are no JSON"):
                send(MODEL, "hi", parameters={"other": value})
        with pytest.raises(MindIEClientException, match="the parameters are no JSON"):
            client.async_infer(MODEL, [tokens(1)], parameters={"other": value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "top_k"])
@pytest.mark.parametrize("value", [10**400, HUGE], ids=["10^400", "10^5000"])
def test_a_parameter_of_any_size_is_refused_by_name(name: str, value: int):
    with MindIEHTTPClient("http://127.0.0.1:9") as client, pytest.raises(MindIEClientException, match=name) as caught:
        client.generate(MODEL, "hi", parameters={name: value})
    assert len(str(caught.value)) < 500


def test_a_name_of_megabytes_is_not_repeated_whole(client):
    with pytest.raises(MindIEClientException, match="model_name must be") as caught:
        client.generate("m" * 10_000_000, "hi")
    assert len(str(caught.value)) < 500
