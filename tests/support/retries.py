"""How long an SDK of Stainless' kind (openai, anthropic) waits before it asks a server again that was busy."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.servers import FakeServer


def waits(client: Any, server: FakeServer, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Ask a server that is starting until the SDK has waited twice: the seconds that it was about to wait."""
    waited = list[float]()
    asked = client._calculate_retry_timeout

    def wait(*given: object, **named: object) -> float:
        waited.append(asked(*given, **named))
        server.health.is_draining = len(waited) < 2
        return 0

    monkeypatch.setattr(client, "_calculate_retry_timeout", wait)
    server.health.is_draining = True
    assert ask()
    return waited
