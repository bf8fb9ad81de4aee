"""The console of a fleet in a real browser: its replicas, their load and hit rates, and requests that moved."""

from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from playwright.sync_api import expect
from starlette.types import Receive, Scope, Send

from kvloom.engine.counts import STEP_TOKEN_BOUNDS
from kvloom.engine.histogram import Histogram
from kvloom.engine.stats import Stats
from kvloom.fleet.args import FleetArgs
from kvloom.fleet.engine import Way, Ways
from kvloom.fleet.figures import told
from kvloom.fleet.ingress import Fleet, Ingress
from kvloom.fleet.plan import make_plan
from kvloom.fleet.routing.board import Board, View
from kvloom.fleet.wire import About
from kvloom.net.listening import listen
from tests.browser.conftest import LIMIT_MS, Open
from tests.fleet.fleets import INFO, Replicas
from tests.support.asgi import PromptServer, in_thread
from tests.support.servers import FakeServer, fake_server

expect.set_options(timeout=LIMIT_MS)


def view(name: str, load: int, role: str = "", is_ready: bool = True, **figures: int) -> View:
    figures = told(Stats(**figures, step_tokens=Histogram(STEP_TOKEN_BOUNDS)))
    stats = {"node": "node-a", "role": role, "is_ready": is_ready, "figures": figures}
    return View(name, load, stats=stats)


class FakeFleet:
    """An ingress whose router sees what a test says; the first request of a client loses its replica."""

    def __init__(self) -> None:
        self.board = Board()
        ways = Ways(Way(Replicas([2]).call, self.board))
        self._ingress = Ingress(make_plan(FleetArgs(backend="fake")), Fleet(self._describe, ways), "n")
        self._app, self._is_loaded = self._ingress.app(), False
        self.url = ""

    async def _describe(self) -> About:
        return About("r0", "w8a8", "1", "n", 1, 256, INFO)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            await self._ingress.load()
        await self._app(scope, receive, send)


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet()
    listener = listen("127.0.0.1", 0)
    fleet.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = PromptServer(uvicorn.Config(fleet.asgi, lifespan="off", log_level="error", interface="asgi3"))
    with in_thread(server, listener):
        yield fleet


def test_replicas_their_load_and_hits_and_moves_are_shown_as_they_change(fleet: FakeFleet, open_page: Open):
    one = view("r-one", 1234, num_running=3, num_waiting=2, total_prompt_tokens=400, total_cached_tokens=100)
    fleet.board.views = [one, view("r-two", 0, "decode", is_ready=False)]
    page = open_page(fleet.url + "/console#live")
    rows = page.locator("#replicas-body tr")
    expect(page.get_by_role("table", name="Replicas")).to_be_visible()
    expect(rows.nth(0).locator("td")).to_have_text(["r-one", "node-a", "–", "ready", "1,234", "3", "2", "25 %"])
    expect(rows.nth(1).locator("td")).to_have_text(["r-two", "node-a", "decode", "not ready", "0", "0", "0", "–"])
    expect(page.locator("#replicas-moves")).to_have_text("0 requests went on at another replica.")

    body = {"model": "mock", "prompt": "hello", "max_tokens": 4}
    assert httpx.post(fleet.url + "/v1/completions", json=body).status_code == 200
    fleet.board.views = [view("r-three", 7, total_prompt_tokens=1, total_cached_tokens=1)]
    expect(rows).to_have_count(1)
    expect(rows.nth(0).locator("td").first).to_have_text("r-three")
    expect(rows.nth(0).locator(".col-hits")).to_have_text("100 %")
    expect(page.locator("#replicas-moves")).to_have_text("1 request went on at another replica.")


@pytest.fixture
def one_engine() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def test_a_server_of_one_engine_has_no_table_of_replicas(one_engine: FakeServer, open_page: Open):
    page = open_page(one_engine.url + "/console#live")
    expect(page.locator("#requests-title")).to_be_visible()
    expect(page.locator("#replicas")).to_be_hidden()
