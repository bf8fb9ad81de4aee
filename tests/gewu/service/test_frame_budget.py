"""Room that clients share is granted in order of arrival and returned completely, in any order of clients."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.gewu.service.frame_budget import FrameBudget

SIZE = 10


def test_room_is_given_in_turn():
    room, given = FrameBudget(10), []
    assert room.take("a", 6, lambda: given.append("a"))
    assert not room.take("b", 6, lambda: given.append("b"))
    assert not room.take("c", 4, lambda: given.append("c"))  # would fit, but is not first
    room.leave("a")
    assert given == ["b", "c"]
    assert not room.take("d", 9, lambda: given.append("d"))
    room.leave("b")
    assert given == ["b", "c"], "there is room, but too little"
    room.leave("c")
    assert given == ["b", "c", "d"]


def test_whoever_holds_most_is_named_when_all_hold_too_much():
    room = FrameBudget(10)
    assert room.set("a", 6) is None
    assert room.set("b", 4) is None, "all of it may be held"
    assert room.set("b", 5) == "a"
    assert room.set("a", 0) is None
    assert room.set("b", 11) == "b"


class RoomMachine(RuleBasedStateMachine):
    """Compared with a plain list of waiting holders: the first gets room as soon as there is enough, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.room = FrameBudget(SIZE)
        self.held: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []
        self.given: list[int] = []

    @rule(holder=st.integers(0, 4), size=st.integers(1, SIZE))
    def take(self, holder: int, size: int) -> None:
        if holder in dict(self.waiting):
            return
        fits = not self.waiting and sum(self.held.values()) + size <= SIZE
        assert self.room.take(holder, size, lambda: self.given.append(holder)) == fits
        if fits:
            self.held[holder] = self.held.get(holder, 0) + size
        else:
            self.waiting.append((holder, size))

    @rule(holder=st.integers(0, 4))
    def leave(self, holder: int) -> None:
        self.room.leave(holder)
        self.held.pop(holder, None)
        self.waiting = [one for one in self.waiting if one[0] != holder]
        expected = []
        while self.waiting and sum(self.held.values()) + self.waiting[0][1] <= SIZE:
            first, size = self.waiting.pop(0)
            self.held[first] = self.held.get(first, 0) + size
            expected.append(first)
        assert self.given == expected
        self.given = []

    @invariant()
    def nobody_is_given_what_is_not_there(self) -> None:
        assert self.given == []
        assert sum(self.held.values()) <= SIZE


RoomMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRoom = RoomMachine.TestCase
