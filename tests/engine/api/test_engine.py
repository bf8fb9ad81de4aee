"""InferenceEngine over a rank with the fake model: its responses, and how each request ends."""

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.sampling import SamplingParams as Params
from kvloom.engine_api import (
    BlockQuotas,
    Code,
    InferenceEngine,
    InferenceRequest,
    InferenceResponse,
    InferResponseEndFlag,
    Operation,
    RequestId,
    SamplingParams,
    Status,
)
from kvloom.engine_api.codes import OK
from kvloom.engine_api.wire import PROTOCOL
from kvloom.rank.fake import fake_answer
from tests.support.configs import mock_document

Responses = queue.Queue[InferenceResponse]
CONFIG = EngineConfig(backend="fake", num_blocks=64, max_seq_len=200, fake_step_s=0.001, max_iter_times=190)
EXAMPLE = Path(__file__).parents[3] / "examples" / "engine_api.py"
NEVER_EOS = (1, 2, 3)  # the fake model's answers to it are longer than the tests' limits


@pytest.fixture
def running() -> Iterator[tuple[InferenceEngine, Responses]]:
    engine, responses = InferenceEngine(), queue.Queue()
    assert engine.init(responses.put, CONFIG).is_ok()
    yield engine, responses
    assert engine.Finalize().IsOk()


def make_request(id: str | int, ids=NEVER_EOS, max_output_len: int | None = None) -> InferenceRequest:
    request = InferenceRequest(id)
    request.set_input_ids(ids)
    if max_output_len is not None:
        assert request.SetMaxOutputLen(max_output_len)
    return request


def rest(responses: Responses) -> list[InferenceResponse]:
    """Responses up to and including the one that ends a request."""
    found = [responses.get(timeout=120)]
    while not found[-1].is_eos():
        found.append(responses.get(timeout=120))
    return found


def ids_of(responses: list[InferenceResponse]) -> list[int]:
    return [id for r in responses for id in r.immutable_output("OUTPUT_IDS")[1].buffer().tolist()]


def flag_of(responses: list[InferenceResponse]) -> str:
    return responses[-1].get_flags().name.removeprefix("INFER_RESPONSE_")


def test_tokens_come_one_by_one_and_the_last_says_why(running):
    engine, responses = running
    assert engine.Forward(make_request(7, max_output_len=5)).IsOk()
    found = rest(responses)
    assert ids_of(found) == fake_answer(NEVER_EOS, Params(temperature=0), 0, 5)
    assert [r.immutable_output("IBIS_EOS_ATTR")[1].buffer()[1] for r in found] == [1] * 5
    assert flag_of(found) == "REACH_MAX_OUTPUT_LEN"
    assert {r.get_request_id() for r in found} == {RequestId(7)}
    assert engine.GetProcessingRequest() == (Status(), 0)


def test_numbers_of_numpy_are_numbers(running):
    """Such numbers once ended the step and the model's process, and with them every other request."""
    engine, responses = running
    given = {
        "temperature": np.float32(0.5), "top_k": np.int32(5), "top_p": np.float64(0.9), "typical_p": 1,
        "seed": np.uint32(7), "repetition_penalty": np.float16(1), "watermark": np.bool_(False),
    }  # fmt: skip
    found = []
    for number, values in enumerate(
        (given, {name: value.item() for name, value in given.items() if name != "typical_p"})
    ):
        request = make_request(number, np.array(NEVER_EOS, np.int16))
        assert request.set_max_output_len(np.int64(5))
        request.set_sampling_params(SamplingParams(do_sample=True, **values))
        assert engine.forward(request).is_ok()
        found.append(rest(responses))
    assert ids_of(found[0]) == ids_of(found[1])
    assert [flag_of(each) for each in found] == ["REACH_MAX_OUTPUT_LEN"] * 2


def test_end_of_sequence_and_a_full_context_have_flags_of_their_own(running):
    engine, responses = running
    ended = next(
        [i] for i in range(256) if 257 in fake_answer([i], Params(temperature=0), 0, 30)
    )  # fmt: skip
    engine.forward(make_request("eos", ended))
    assert flag_of(rest(responses)) == "EOS"
    prompt = next(p for p in ((i,) * 195 for i in range(256)) if 257 not in fake_answer(p, Params(temperature=0), 0, 5))
    engine.forward(make_request("full", prompt))
    found = rest(responses)
    assert (len(ids_of(found)), flag_of(found)) == (5, "REACH_MAX_SEQ_LEN")


def test_the_answer_limit_of_the_model_is_a_limit_of_output(running):
    engine, responses = running
    start = next(i for i in range(256) if 257 not in fake_answer([i], Params(temperature=0), 0, 190))
    engine.forward(make_request("long", [start]))
    found = rest(responses)
    assert (len(ids_of(found)), flag_of(found)) == (190, "REACH_MAX_OUTPUT_LEN")


def test_a_text_is_encoded_and_sampling_is_used(running):
    engine, responses = running
    request = InferenceRequest("t")
    request.set_input_text("hi")
    request.set_max_output_len(4)
    request.set_sampling_params(SamplingParams(do_sample=True, seed=5))
    assert engine.forward(request).is_ok()
    assert ids_of(rest(responses)) == fake_answer(list(b"hi"), Params(), 5, 4)


def test_a_request_may_bring_its_own_callback(running):
    engine, responses = running
    own: Responses = queue.Queue()
    request = make_request("own", max_output_len=2)
    request.SetSendResponseCallback(own.put)
    engine.forward(request)
    assert len(ids_of(rest(own))) == 2
    assert responses.empty()


def test_a_stopped_request_ends_with_cancel_even_before_its_first_token(running):
    engine, responses = running
    for _ in range(20):
        assert engine.forward(make_request("long")).is_ok()
        assert engine.forward(make_request("long")) == Status(Code.INVALID_ARG)
        assert engine.ControlRequest("long", Operation.STOP).is_ok()
        assert flag_of(rest(responses)) == "CANCEL"
    assert engine.control_request("long", Operation.STOP) == Status(Code.NOT_FOUND)
    assert engine.control_request("long", 2) == Status(Code.INVALID_ARG)


def test_illegal_input_is_found_at_once_or_by_the_callback(running):
    engine, responses = running
    bad, long = make_request(1, [999]), make_request(2, [1] * 200)
    assert engine.forward(bad, valid_request=True) == Status(Code.INVALID_ARG)
    assert "vocabulary" in engine.forward(bad, True).status_msg()
    assert "must fit in 200" in engine.forward(long, True).status_msg()
    assert engine.forward(bad).is_ok()
    found = rest(responses)
    assert flag_of(found) == "ILLEGAL_INPUT"
    assert "vocabulary" in found[-1].error
    assert engine.forward(InferenceRequest(3)) == Status(Code.INVALID_ARG)


def test_quotas_count_what_has_been_handed_over(running):
    engine, responses = running
    assert engine.GetMaxBatchSize() == (Status(), 64)
    assert engine.get_request_block_quotas() == (Status(), BlockQuotas(64, 64, 512))
    engine.forward(make_request(1, [1] * 100, max_output_len=150))
    quotas = engine.get_request_block_quotas()[1]
    assert quotas.remain_blocks <= 64 - 7
    rest(responses)


def test_a_rank_that_dies_is_a_pause_of_its_requests(running):
    engine, responses = running
    engine.forward(make_request("a", max_output_len=150))
    responses.get(timeout=120)
    os.kill(engine._engine._executor.pids[0], signal.SIGKILL)
    assert flag_of(rest(responses)) == "REACH_MAX_OUTPUT_LEN"
    assert engine.get_processing_request() == (Status(), 0)
    engine.forward(make_request("after", max_output_len=1))
    assert flag_of(rest(responses)) == "REACH_MAX_OUTPUT_LEN"


def test_a_callback_that_raises_stops_its_request_alone_and_finalize_tells():
    engine, responses = InferenceEngine(), queue.Queue()
    assert engine.init(responses.put, CONFIG).is_ok()
    bad = make_request("bad")
    bad.set_send_response_callback(lambda response: 1 // 0)
    engine.forward(bad)
    engine.forward(make_request("good", max_output_len=30))
    assert flag_of(rest(responses)) == "REACH_MAX_OUTPUT_LEN"
    while engine.get_processing_request()[1]:
        pass
    status = engine.finalize()
    assert status == Status(Code.ERROR)
    assert "ZeroDivisionError" in status.status_msg()


def test_finalize_answers_what_runs_and_the_engine_can_be_initialised_again():
    engine, responses = InferenceEngine(), queue.Queue()
    for _ in range(2):
        assert engine.init(responses.put, CONFIG).is_ok()
        assert engine.init(responses.put, CONFIG) == Status(Code.ERROR)
        for id in range(5):
            engine.forward(make_request(id))
        assert engine.finalize().status_msg() == "Success"
        ends = [r.get_flags() for r in list(responses.queue) if r.is_eos()]
        assert ends == [InferResponseEndFlag.INFER_RESPONSE_EXEC_ERROR] * 5
        responses.queue.clear()
    assert engine.finalize() == engine.forward(make_request(1)) == Status(Code.ERROR)


def test_finalize_from_a_callback_is_refused():
    engine, found = InferenceEngine(), queue.Queue()
    assert engine.init(lambda response: found.put(engine.finalize()), CONFIG).is_ok()
    engine.forward(make_request(1, max_output_len=1))
    assert "from a callback" in found.get(timeout=120).status_msg()
    assert engine.finalize().is_ok()


def test_an_engine_that_is_not_there_says_so():
    engine = InferenceEngine()
    assert engine.get_max_batch_size()[0] == engine.get_request_block_quotas()[0] == Status(Code.ERROR)
    assert engine.get_processing_request() == (Status(), 0)


def test_an_engine_without_any_callback_takes_requests_that_bring_one():
    with InferenceEngine() as engine:
        assert engine.init(None, CONFIG).is_ok()
        assert engine.forward(make_request(1)) == Status(Code.INVALID_ARG)
        own: Responses = queue.Queue()
        request = make_request(2, max_output_len=1)
        request.set_send_response_callback(own.put)
        assert engine.forward(request).is_ok()
        assert flag_of(rest(own)) == "REACH_MAX_OUTPUT_LEN"


def test_a_configuration_that_is_wrong_is_one_sentence(tmp_path):
    assert InferenceEngine().init(print, str(tmp_path / "none.json")) == Status(Code.INVALID_ARG)
    assert "none.json" in InferenceEngine().init(print, str(tmp_path / "none.json")).status_msg()
    missing = EngineConfig(model=str(tmp_path / "nothing"))
    assert InferenceEngine().init(print, missing) == Status(Code.ERROR)


def test_a_configuration_whose_keys_cannot_be_read_is_a_status_too(tmp_path):
    path = tmp_path / "config.json"
    document = mock_document()
    document["OtherParam"]["ServeParam"]["apiKeyFile"] = "no-such-file"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    status = InferenceEngine().init(print, path)
    assert status == Status(Code.ERROR)
    assert "no-such-file" in status.status_msg()


def test_the_sample_program_runs(tmp_path, mock_config):
    (tmp_path / "data.csv").write_text("".join(f"1,{i},{i + 1}\n" for i in range(30)))
    command = [sys.executable, str(EXAMPLE), str(mock_config), "data.csv", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Finished") == 30
    assert "finalize message is : Success" in result.stdout
    rows = (tmp_path / "token_output.csv").read_text().splitlines()
    expected = fake_answer([1, 4, 5], Params(temperature=0), 0, 16)
    expected = expected[: expected.index(257) + 1] if 257 in expected else expected
    assert [int(v) for v in rows[4].split(",")] == expected
    assert len(rows) == 30


@pytest.fixture
def mock_config(tmp_path) -> Path:
    """The path of a config.json for the mock model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(mock_document()))
    path.chmod(0o600)
    return path


def test_a_callback_that_exits_ends_its_own_request_alone():
    engine, responses = InferenceEngine(), queue.Queue()

    def take(response: InferenceResponse) -> None:
        if response.get_request_id() == RequestId("exits"):
            sys.exit(3)
        responses.put(response)

    assert engine.init(take, CONFIG).is_ok()
    assert engine.forward(make_request("exits")).is_ok()
    assert engine.forward(make_request("other", max_output_len=20)).is_ok()
    assert rest(responses)[-1].get_flags() is InferResponseEndFlag.INFER_RESPONSE_REACH_MAX_OUTPUT_LEN
    assert engine.finalize() == Status(Code.ERROR)


def test_a_long_text_that_is_being_tokenised_keeps_nobody_waiting(running, monkeypatch):
    engine, responses = running
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def encode(self, text: str, max_tokens: int) -> list[int]:
            begun.set()
            assert go_on.wait(120)
            return [1, 2, 3]

        def least_tokens(self, text: str) -> int:
            return 0

    assert engine.forward(make_request("other", max_output_len=5)).is_ok()
    monkeypatch.setattr(engine, "_tokenizer", Slow())
    request = InferenceRequest("long")
    request.set_input_text("long")
    request.set_max_output_len(2)
    thread = threading.Thread(target=engine.forward, args=(request,))
    thread.start()
    assert begun.wait(120)
    assert rest(responses)[-1].get_request_id() == RequestId("other")
    assert engine.get_processing_request() == (OK, 0)
    go_on.set()
    thread.join(120)
    assert rest(responses)[-1].get_request_id() == RequestId("long")


def answers_in_a_child(answer: Callable[[], bytes]) -> bytes:
    """What a forked child answers; it ends without cleaning up."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        os.write(writing, answer())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return found


def test_in_the_child_of_a_fork_no_engine_is_initialised(running):
    engine, responses = running
    assert engine.forward(make_request("parent's", max_output_len=100)).is_ok()

    def answer() -> bytes:
        ends = queue.Queue[InferenceResponse]()
        codes = [engine.forward(make_request("x")), engine.finalize(), engine.init(ends.put, CONFIG)]
        codes.append(engine.forward(make_request("own", max_output_len=3)))
        own = rest(ends)[-1].get_request_id() == RequestId("own")
        return repr([*(status.is_ok() for status in (*codes, engine.finalize())), own]).encode()

    assert answers_in_a_child(answer) == b"[False, False, True, True, True, True]"
    assert rest(responses)[-1].get_flags() is InferResponseEndFlag.INFER_RESPONSE_REACH_MAX_OUTPUT_LEN


def test_a_child_that_a_callback_has_forked_ends_with_it():
    engine, responses, children = InferenceEngine(), queue.Queue(), []

    def take(response: InferenceResponse) -> None:
        if not children:
            children.append(os.fork())
        if children[0]:
            responses.put(response)

    assert engine.init(take, CONFIG).is_ok()
    assert engine.forward(make_request("a", max_output_len=20)).is_ok()
    assert len(rest(responses)) == 20
    assert os.waitpid(children[0], 0)[1] == 0
    assert engine.finalize().is_ok()


def test_a_host_without_standard_streams_gives_no_number_of_theirs_to_the_socket():
    ours, theirs = socket.socketpair()
    command = ["sh", "-c", f'exec "$0" -m kvloom.engine_api.host {theirs.fileno()} >&- 2>&-', sys.executable]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as host, ours:
        theirs.close()
        hello = struct.pack("=IcI", 5, b"H", PROTOCOL)
        ours.sendall(hello)
        assert ours.recv(9)[4:] == hello[4:]
        assert [os.readlink(f"/proc/{host.pid}/fd/{number}") for number in (1, 2)] == ["/dev/null"] * 2
