"""Sessions: random calls against the invariants and a toy model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.qos import Level
from kvloom.gewu.schema import Chat
from kvloom.gewu.sessions import MAX_PER_SESSION, MAX_REQUESTS, Phase, Request, Session, Sessions

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

    @rule(owner=owners, id=ids, place=st.integers(0, 2))
    def end(self, owner, id, place):
        session = self.find(owner, id)
        if session is not None and place < len(session.requests):
            request = session.requests[place]
            assert self.sessions.end(request) == ((owner, id, request.id) in self.started)
            assert not self.sessions.end(request)
            self.queues[owner, id].remove(request.id)

    @rule(owner=owners, id=ids)
    def destroy(self, owner, id):
        if (session := self.find(owner, id)) is not None:
            running = {request.id for request in self.sessions.destroy(session)}
            assert running == {r for r in self.queues.pop((owner, id)) if (owner, id, r) in self.started}
            assert all(request.phase is Phase.ENDED for request in session.requests)

    @invariant()
    def holds(self):
        self.sessions.check()
        found = {(s.owner, s.id): [request.id for request in s.requests] for s in self.sessions}
        assert found == self.queues


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
