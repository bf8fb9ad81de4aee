"""The Python binding, when sessions are closed under their streams, and given what is no text."""

import threading
from collections.abc import Iterator

import pytest

from kvloom.gewu import Code, Refused, Session
from tests.support.waiting import WAIT_S

MESSAGES = [{"role": "user", "content": "hi"}]
NO_TEXT = "\udcff"  # a byte of a command line that is not UTF-8


@pytest.fixture
def session(daemon, model, monkeypatch) -> Iterator[Session]:
    monkeypatch.setenv("GEWU_SOCKET", str(daemon.socket))
    with Session(str(model)) as session:
        yield session


def test_a_stream_ends_when_its_session_is_closed(session: Session):
    stream = session.stream(MESSAGES)
    assert next(stream) == "LLM "
    session.close()
    ended: list[Refused] = []

    def read() -> None:
        try:
            list(stream)
        except Refused as refused:
            ended.append(refused)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert [(refused.code, str(refused)) for refused in ended] == [(Code.NOENT, "the session was closed")]


def test_a_thread_that_waits_for_an_answer_learns_that_the_session_is_closed(session: Session):
    refused: list[Code] = []

    def ask() -> None:
        try:
            while True:
                session.ask(MESSAGES)
        except Refused as why:
            refused.append(why.code)

    readers = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for reader in readers:
        reader.start()
    session.close()
    for reader in readers:
        reader.join(WAIT_S)
    assert refused == [Code.NOENT] * 4


def test_every_close_waits_for_the_callback_that_runs(session: Session):
    inside, go_on, returned = threading.Event(), threading.Event(), []

    def on_reply(reply: object) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    def close() -> None:
        session.close()
        returned.append(go_on.is_set())

    session.submit(MESSAGES, on_reply)
    assert inside.wait(WAIT_S)
    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.1)
    with pytest.raises(Refused) as caught:
        session.submit(MESSAGES, on_reply)
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert (caught.value.code, returned) == (Code.NOENT, [True] * 3)


def test_a_stream_may_be_left_after_its_session(session: Session):
    stream = session.stream(MESSAGES)
    next(stream)
    session.close()
    stream.close()


def test_what_is_no_text_is_refused(session: Session):
    with pytest.raises(Refused) as caught:
        session.ask([{"role": "user", "content": NO_TEXT}])
    assert (caught.value.code, str(caught.value)) == (Code.INVAL, r"'\udcff' is not UTF-8")
    with pytest.raises(Refused) as caught:
        Session(f"/models/{NO_TEXT}")
    assert (caught.value.code, str(caught.value)) == (Code.INVAL, r"'/models/\udcff' is not UTF-8")
    assert session.ask(MESSAGES).startswith("LLM")
