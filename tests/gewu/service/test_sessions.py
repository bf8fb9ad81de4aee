"""Sessions: random calls against the invariants and a toy model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.protocol.schema import Chat
from kvloom.gewu.qos import Level
from kvloom.gewu.service.sessions import (
    MAX_PER_SESSION,
    MAX_PROMPT_BYTES,
    MAX_REQUESTS,
    MAX_SESSIONS,
    Phase,
    Request,
    Session,
    Sessions,
)

CHAT = Chat((("user", "hi"),))
owners, ids = st.integers(1, 2), st.integers(1, 3)


class Machine(RuleBasedStateMachine):
    """The toy: a queue of request numbers a session, the first of which may be started."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.queues: dict[tuple[int, int], list[int]] = {}
        self.started: set[tuple[int, int, int]] = set()
        self.last = 0

    def find(self, owner: int, id: int) -> Session | None:
        if (owner, id) in self.queues:
            return self.sessions.find(owner, id)
        with pytest.raises(Refused) as caught:
            self.sessions.find(owner, id)
        assert caught.value.code is Code.NOENT
        return None

    @rule(owner=owners, id=ids)
    def create(self, owner, id):
        session = Session(owner, id, "model", None)
        if (owner, id) in self.queues:
            with pytest.raises(Refused):
                self.sessions.create(session)
        else:
            self.sessions.create(session)
            self.queues[owner, id] = []

    @rule(owner=owners, id=ids)
    def submit(self, owner, id):
        if (session := self.find(owner, id)) is not None:
            self.last += 1
            self.sessions.submit(session, Request(session, self.last, CHAT, Level.DEFAULT))
            self.queues[owner, id].append(self.last)

    @rule(owner=owners, id=ids)
    def start(self, owner, id):
        if (session := self.find(owner, id)) is not None:
            request = self.sessions.start_next(session)
            queue = self.queues[owner, id]
            startable = bool(queue) and (owner, id, queue[0]) not in self.started
            assert (request is not None) == startable
            if request is not None:
                assert request.id == queue[0]
                self.started.add((owner, id, request.id))

    @rule(owner=owners, id=ids, index=st.integers(0, 2))
    def end(self, owner, id, index):
        session = self.find(owner, id)
        if session is not None and index < len(session.requests):
            request = session.requests[index]
            assert self.sessions.end(request) == ((owner, id, request.id) in self.started)
            assert not self.sessions.end(request)
            self.queues[owner, id].remove(request.id)

    @rule(owner=owners, id=ids)
    def destroy(self, owner, id):
        if (session := self.find(owner, id)) is not None:
            running = {request.id for request in self.sessions.destroy(session)}
            assert running == {r for r in self.queues.pop((owner, id)) if (owner, id, r) in self.started}
            assert all(request.phase is Phase.ENDED for request in session.requests)

    @rule(owner=owners)
    def end_client(self, owner):
        for session in self.sessions.of_owner(owner):
            self.sessions.destroy(session)
        self.queues = {of: queue for of, queue in self.queues.items() if of[0] != owner}

    @invariant()
    def holds(self):
        self.sessions.check()
        assert len(self.sessions) == len(self.queues)
        requests = {f"{owner}.{id}.{number}": number for (owner, id), queue in self.queues.items() for number in queue}
        assert {request.key: request.id for request in self.sessions.unfinished("model")} == requests
        assert all(self.sessions.request(key).key == key for key in requests)
        is_started = {(r.session.owner, r.session.id, r.id) for r in self.sessions.started()}
        assert is_started == {(*of, queue[0]) for of, queue in self.queues.items() if (*of, *queue[:1]) in self.started}
        found = {(s.owner, s.id): [request.id for request in s.requests] for s in self.sessions}
        assert found == self.queues


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_handle_is_its_client_s_own_and_taken_once():
    sessions = Sessions()
    session = Session(1, 7, "model", None)
    sessions.create(session)
    with pytest.raises(Refused) as caught:
        sessions.create(Session(1, 7, "other", None))
    assert caught.value.code is Code.EXIST
    assert sessions.find(1, 7) is session
    with pytest.raises(Refused) as caught:
        sessions.find(2, 7)
    assert caught.value.code is Code.NOENT
    assert list(sessions) == [session]


def test_who_ends_a_session_is_told_which_of_its_requests_runs():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    for number in (1, 2):
        sessions.submit(session, Request(session, number, CHAT, Level.DEFAULT))
    request = sessions.start_next(session)
    assert list(sessions.started()) == [request]
    assert [one.id for one in sessions.unfinished("model")] == [1, 2]
    assert sessions.destroy(session) == [request]
    assert len(sessions) == 0


def test_the_65th_request_of_a_session_is_refused():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    for i in range(MAX_PER_SESSION):
        sessions.submit(session, Request(session, i, CHAT, Level.DEFAULT))
    with pytest.raises(Refused) as caught:
        sessions.submit(session, Request(session, 99, CHAT, Level.DEFAULT))
    assert caught.value.code is Code.NOMEM


def test_the_513th_request_of_all_is_refused():
    sessions = Sessions()
    for i in range(MAX_REQUESTS):
        session = Session(1, i, "model", None)
        sessions.create(session)
        sessions.submit(session, Request(session, 1, CHAT, Level.DEFAULT))
    with pytest.raises(Refused) as caught:
        sessions.submit(session, Request(session, 2, CHAT, Level.DEFAULT))
    assert caught.value.code is Code.NOMEM


def test_the_1025th_session_of_a_client_is_refused_and_another_client_s_is_not():
    sessions = Sessions()
    for i in range(MAX_SESSIONS):
        sessions.create(Session(1, i, "model", None))
    with pytest.raises(Refused) as caught:
        sessions.create(Session(1, MAX_SESSIONS, "model", None))
    assert caught.value.code is Code.NOMEM
    sessions.create(Session(2, 1, "model", None))


def test_unfinished_requests_hold_64_mib_of_text():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    half, more = (Chat((("user", "x" * size),)) for size in (MAX_PROMPT_BYTES // 2, MAX_PROMPT_BYTES // 2 + 1))
    first = Request(session, 1, half, Level.DEFAULT)
    sessions.submit(session, first)
    with pytest.raises(Refused) as caught:
        sessions.submit(session, Request(session, 2, more, Level.DEFAULT))
    assert caught.value.code is Code.NOMEM
    sessions.submit(session, Request(session, 2, half, Level.DEFAULT))
    sessions.end(first)
    sessions.submit(session, Request(session, 3, half, Level.DEFAULT))
    sessions.check()


def test_a_request_s_number_is_taken_until_it_ends():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    request = Request(session, 1, CHAT, Level.DEFAULT)
    sessions.submit(session, request)
    with pytest.raises(Refused) as caught:
        sessions.submit(session, Request(session, 1, CHAT, Level.DEFAULT))
    assert caught.value.code is Code.EXIST
    sessions.end(request)
    sessions.submit(session, Request(session, 1, CHAT, Level.DEFAULT))


def test_sessions_are_found_by_client_and_by_model():
    sessions = Sessions()
    made = [Session(owner, id, model, None) for owner, id, model in ((1, 1, "a"), (1, 2, "b"), (2, 1, "b"))]
    for session in made:
        sessions.create(session)
    assert sessions.of_owner(1) == made[:2]
    assert sessions.of_model("b") == made[1:]
    assert len({session.salt for session in made}) == 3, "none finds the blocks of another"


def test_the_oldest_request_starts_once_and_the_next_when_it_has_ended():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    assert sessions.start_next(session) is None
    first, second = (Request(session, number, CHAT, Level.DEFAULT) for number in (1, 2))
    for request in (first, second):
        sessions.submit(session, request)
    assert sessions.start_next(session) is first
    assert sessions.start_next(session) is None
    assert list(sessions.started()) == [first]
    assert sessions.end(first), "the model must drop it"
    assert not sessions.end(first)
    assert sessions.start_next(session) is second
    assert sessions.destroy(session) == [second]
    sessions.check()


def test_a_request_is_found_by_its_key_until_it_ends():
    sessions = Sessions()
    session = Session(1, 1, "model", None)
    sessions.create(session)
    request = Request(session, 1, CHAT, Level.DEFAULT)
    sessions.submit(session, request)
    assert sessions.request(request.key) is request
    sessions.end(request)
    assert sessions.request(request.key) is None
