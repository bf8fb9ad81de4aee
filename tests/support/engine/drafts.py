"""Engines that draft all that is guessed, whatever it costs: what fake and tiny models take says nothing of profit."""

import pytest

from kvloom.engine.schedule.by_model import FREE
from kvloom.engine.schedule.pace import Pace


def draft_always(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone. Where there is a draft model, its guesses are taken."""
    patch.setattr(Pace, "least_chance", lambda self, base, most: 0.0)
    patch.setattr(Pace, "draft_lengths", lambda self, guesses, base: [len(chances) for _, chances, _ in guesses])
    patch.setattr(Pace, "draft_rate", lambda self, seq, chances, price, base: float(price is not FREE))
