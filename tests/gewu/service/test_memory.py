"""Memory: budget, admission, the pressure ladder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.gewu.qos import Level
from kvloom.gewu.service.memory import (
    Holder,
    Ladder,
    Readings,
    budget_bytes,
    kv_need,
    kv_tokens,
    parse_bytes,
    plan_admission,
)

GIB = 1 << 30
CALM = Readings(8 * GIB, 16 * GIB, some_stall_us=0, full_stall_us=0)


@pytest.mark.parametrize(
    ("readings", "configured", "held", "budget"),
    [
        (Readings(8 * GIB, 10 * GIB), None, 0, 7 * GIB),  # a tenth is kept
        (Readings(GIB, GIB), None, 0, GIB - (256 << 20)),  # at least 256 MiB
        (Readings(8 * GIB, 10 * GIB), 2 * GIB, 0, 2 * GIB),
        (Readings(8 * GIB, 10 * GIB, limit_bytes=3 * GIB, used_bytes=GIB), None, 0, 2 * GIB),
        (Readings(8 * GIB, 10 * GIB, limit_bytes=3 * GIB, used_bytes=2 * GIB), None, GIB, 2 * GIB),
        (Readings(0, 10 * GIB), None, 5, 5),
    ],
)
def test_the_budget_is_the_smallest_limit(readings, configured, held, budget):
    assert budget_bytes(readings, configured, held) == budget


def test_idle_models_go_first_then_low_classes():
    holders = [
        Holder("busy", 10, Level.BACKGROUND, 0.0),
        Holder("idle-new", 10, None, 2.0),
        Holder("idle-old", 10, None, 1.0),
    ]
    assert plan_admission(10, 40, holders, Level.DEFAULT) == []
    assert plan_admission(20, 40, holders, Level.DEFAULT) == ["idle-old"]
    assert plan_admission(30, 40, holders, Level.DEFAULT) == ["idle-old", "idle-new"]
    assert plan_admission(40, 40, holders, Level.DEFAULT) == ["idle-old", "idle-new", "busy"]
    assert plan_admission(40, 40, holders, Level.BACKGROUND) is None
    assert plan_admission(41, 40, holders, Level.USER_INTERACTIVE) is None


levels = st.sampled_from(list(Level))
holder = st.builds(Holder, st.uuids().map(str), st.integers(1, 50), st.none() | levels, st.floats(0, 9))


@given(st.lists(holder, max_size=6), st.integers(0, 200), st.integers(1, 200), levels)
def test_what_is_admitted_fits_and_no_higher_class_is_evicted(holders, budget, need, level):
    victims = plan_admission(need, budget, holders, level)
    evictable = [h for h in holders if h.level is None or h.level < level]
    if victims is None:
        assert budget - sum(h.bytes for h in holders if h not in evictable) < need
    else:
        assert {h.key for h in evictable} >= set(victims)
        assert sum(h.bytes for h in holders if h.key not in victims) + need <= budget


def test_a_kv_cache_is_what_is_wanted_or_what_fits():
    assert kv_tokens(100, 100_000, 500) == 500
    assert kv_tokens(100, 10_000, 500) == 100


@pytest.mark.parametrize(
    ("prompt_bytes", "max_tokens", "max_seq_len", "need"),
    [
        (400, None, None, 356),  # an answer without a limit: what admission asks for
        (400, 1000, None, 1100),
        (400, 10, None, 110),
        (400, 1000, 200, 200),
        (40_000, 1, 200, 200),  # too long: it will end with "length"
    ],
)
def test_what_a_request_needs(prompt_bytes, max_tokens, max_seq_len, need):
    assert kv_need(prompt_bytes, max_tokens, max_seq_len) == need


@pytest.mark.parametrize(
    ("some_us", "full_us", "available", "level"),
    [
        (149_999, 0, 8 * GIB, 0),
        (150_000, 0, 8 * GIB, 1),
        (0, 100_000, 8 * GIB, 2),
        (0, 0, GIB, 1),
        (0, 0, GIB // 2, 2),
    ],
)
def test_stalls_and_shortage_raise_the_level(some_us, full_us, available, level):
    ladder = Ladder()
    assert ladder.update(CALM, 0.0) == 0
    assert ladder.update(Readings(available, 16 * GIB, None, 0, some_us, full_us), 1.0) == level


def test_stalls_count_within_two_seconds():
    ladder = Ladder()
    for second in range(20):
        assert ladder.update(Readings(8 * GIB, 16 * GIB, None, 0, second * 70_000, 0), float(second)) == 0


def test_a_trigger_raises_the_level_at_once_and_it_is_left_like_any_other():
    ladder = Ladder()
    assert ladder.update(CALM, 0.0) == 0
    assert ladder.update(CALM, 0.1, fired=2) == 2
    assert ladder.update(CALM, 1.0) == 2
    assert ladder.update(CALM, 11.0) == 1


def test_a_level_is_left_after_ten_seconds_below_it():
    ladder = Ladder()
    ladder.update(CALM, 0.0)
    stalled = Readings(8 * GIB, 16 * GIB, None, 0, 0, 100_000)
    assert ladder.update(stalled, 1.0) == 2
    assert [ladder.update(stalled, float(second)) for second in (4, 13, 14, 23, 24)] == [2, 2, 1, 1, 0]


@pytest.mark.parametrize(("text", "count"), [("1024", 1024), ("512M", 512 << 20), ("1.5G", 3 << 29), ("2GiB", 2 << 30)])
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "1X", "G", "inf", "1e400", "-1", "-2G", "nan", "0", "0G", "0.5"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be bytes, 1 at least, or like 512M or 2G, got"):
        parse_bytes(text)
