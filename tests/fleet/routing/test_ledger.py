"""The ledger of each replica's outstanding work: routed, begun, ended."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom.fleet.routing.ledger import STREAM_TOKENS, Ledger


def test_a_prompt_counts_until_its_first_token_then_as_a_stream_then_not():
    ledger = Ledger()
    ledger.routed("r", "a", 500)
    assert ledger.load("a") == 500 + STREAM_TOKENS
    ledger.begun("r")
    assert ledger.load("a") == STREAM_TOKENS
    ledger.begun("r")
    ledger.ended("r")
    ledger.ended("r")
    assert ledger.load("a") == 0


def test_a_request_that_moves_is_its_new_replicas():
    ledger = Ledger()
    ledger.routed("r", "a", 500)
    ledger.routed("r", "b", 600)
    assert (ledger.load("a"), ledger.load("b")) == (0, 600 + STREAM_TOKENS)


def test_what_other_ingresses_have_given_is_what_is_reported_beyond_ones_own():
    ledger = Ledger()
    ledger.routed("r", "a", 500)
    ledger.reported("a", 2000)
    assert ledger.load("a") == 2000
    ledger.reported("a", 100)
    assert ledger.load("a") == 500 + STREAM_TOKENS


events = st.lists(
    st.tuples(st.sampled_from(["routed", "begun", "ended"]), st.sampled_from("xyz"), st.sampled_from("ab")), max_size=40
)


@given(events)
def test_no_load_is_below_nothing_and_none_is_left(happened):
    ledger = Ledger()
    for what, key, replica in happened:
        if what == "routed":
            ledger.routed(key, replica, 100)
        else:
            getattr(ledger, what)(key)
        assert min(ledger.load("a"), ledger.load("b")) >= 0
    for key in "xyz":
        ledger.ended(key)
    assert (ledger.load("a"), ledger.load("b")) == (0, 0)
