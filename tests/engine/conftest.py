"""Fixtures of the engine's tests."""

import pytest

from kvloom.engine.schedule import scheduler


@pytest.fixture
def swaps_always(monkeypatch):
    """Swaps always: on a busy machine, copying a tiny model's blocks may measure slower than recomputing them."""
    monkeypatch.setattr(scheduler, "is_swap_cheaper", lambda num_blocks, num_tokens, costs: True)
