"""The pages while their server starts, hangs, is replaced by another one, or wants another key; and in odd browsers."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from playwright.sync_api import Route, expect

from kvloom.server.secure.api_keys import new_key
from tests.browser.conftest import LIMIT_MS, Open
from tests.browser.test_console import done, say
from tests.support.servers import FakeServer, fake_server

expect.set_options(timeout=LIMIT_MS)

NO_STORAGE = """for (const name of ["sessionStorage", "localStorage"]) Object.defineProperty(
    window, name, { get() { throw new DOMException("denied", "SecurityError"); } });"""
FEED, MODELS, CONFIG = "**/console/feed", "**/v1/models", "**/console/config"
WIDTHS = (
    "[...document.querySelectorAll('main > :not([hidden]), #log')].map((each) => each.scrollWidth - each.clientWidth)"
)


@pytest.fixture
def slow() -> Iterator[FakeServer]:
    """A server with long, slow answers."""
    with fake_server(has_eos=False, step_s=0.01) as server:
        yield server


@pytest.fixture
def pair() -> Iterator[FakeServer]:
    """A server of two models."""
    with fake_server(names=("one", "two")) as server:
        yield server


def renaming(**names: str) -> Callable[[Route], None]:
    """Answers as a server whose models have other names."""

    def handle(route: Route) -> None:
        response = route.fetch()
        text = response.text()
        for name, other in names.items():
            text = text.replace(f'"{name}"', json.dumps(other))
        route.fulfill(response=response, body=text)

    return handle


def loading(route: Route) -> None:
    route.fulfill(status=503, json={"error": {"message": "the model is being loaded"}})


def test_a_page_that_is_open_before_the_model_is_there_gets_everything_then(
    pair: FakeServer, open_page: Open, complaints: list[str]
):
    page = open_page(pair.url + "/docs")
    for path in (FEED, MODELS, CONFIG):
        page.route(path, loading)
    page.goto(pair.url + "/console")
    expect(page.locator("#pulse-text")).to_have_text("the model is being loaded")
    for path in (FEED, MODELS, CONFIG):
        page.unroute(path)
    expect(page.locator("#pulse-text")).to_have_text("ready")
    expect(page.locator("#model option")).to_have_text(["one", "two"])
    expect(page.locator("#config-groups h2")).to_have_text(["Server", "Model one", "Model two"])
    expect(page.locator("#chat-notice")).to_be_hidden()
    complaints.clear()


def test_another_server_at_this_address_is_noticed(pair: FakeServer, open_page: Open):
    page = open_page(pair.url + "/console")
    page.locator("#model").select_option("two")
    page.locator("nav a[href='#live']").click()
    page.locator("#live-model").select_option("one")
    for path in (FEED, MODELS, CONFIG):
        page.route(path, renaming(one="three"))

    def younger(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "uptime_s": 0.01})

    page.route(FEED, younger, times=1)
    expect(page.locator("#live-model option")).to_have_text(["All models", "three", "two"])
    expect(page.locator("#chart-kv .second")).to_have_text("of 1,024")  # of all models: "one" is gone
    expect(page.locator("#model option")).to_have_text(["three", "two"])
    expect(page.locator("#model")).to_have_value("two")
    expect(page.locator("#config-groups h2")).to_have_text(["Server", "Model three", "Model two"])


def test_figures_of_another_life_are_not_subtracted(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console")
    found = page.evaluate(
        """async () => {
            const { History } = await import(new URL("console/live.js", document.baseURI));
            const history = new History();
            const model = (count, sum_s) => ({ name: "m", first_token: { count, sum_s } });
            const sample = (uptime_s, count, sum_s) => ({ uptime_s, models: [model(count, sum_s)] });
            history.add(sample(100, 2, 50), 0);
            history.add(sample(101, 3, 51), 1);
            history.add(sample(0.5, 4, 0.4), 2);
            history.add(sample(1.5, 6, 0.8), 3);
            const mean = (i) => history.mean(i, (m) => m.first_token.sum_s, (m) => m.first_token.count);
            return [0, 1, 2, 3].map(mean);
        }"""
    )
    assert found == [None, 1, None, pytest.approx(0.2)]


def test_a_server_that_hangs_is_told_and_found_again(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/docs")
    page.add_init_script(
        "{ const wait = AbortSignal.timeout; AbortSignal.timeout = () => wait.call(AbortSignal, 500); }"
    )
    page.route(FEED, lambda route: None, times=1)
    page.goto(slow.url + "/console")
    expect(page.locator("#pulse-text")).to_have_text("the server does not answer")
    expect(page.locator("#pulse-text")).to_have_text("ready")


def test_a_new_chat_knows_nothing_of_the_answer_that_it_ended(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console", viewport={"width": 1280, "height": 800})
    say(page, "first", 1500)
    page.wait_for_selector(".answer[aria-busy=true] .token")
    page.locator("#clear").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "second", 3)
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "second"}]
    expect(page.locator(".empty")).to_have_count(0)
    done(page)


def test_an_answer_that_is_no_json_is_told(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console")
    body = 'data: {"choices": [\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    say(page, "hello")
    done(page)
    expect(page.locator(".turn .problem")).to_have_text("The server's answer cannot be read.")
    page.route(FEED, lambda route: route.fulfill(content_type="text/html", body="<p>Log in first"))
    expect(page.locator("#pulse-text")).to_have_text("the server's answer cannot be read")


def test_what_cannot_be_a_key_is_not_accepted(open_page: Open, complaints: list[str]):
    key = new_key()
    with fake_server(keys=[key]) as server:
        page = open_page(server.url + "/console")
        field = page.locator("#key")
        for wrong in ("密钥密钥密钥密钥", "two words", "\u200b" + key):
            field.fill(wrong)
            field.press("Enter")
            expect(page.locator("#key-problem")).to_have_text("This key is not accepted.")
        field.fill(f" {key} ")
        field.press("Enter")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        expect(page.locator("#key-form")).to_be_hidden()
        page.close()
    assert all("401" in text for text in complaints)
    complaints.clear()


def test_a_key_that_ends_is_asked_for_again(open_page: Open, complaints: list[str]):
    key = new_key()
    with fake_server(keys=[key]) as server:
        page = open_page(server.url + "/console")
        page.locator("#key").fill(key)
        page.locator("#key").press("Enter")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.route(FEED, lambda route: route.fulfill(status=401, json={"error": "no"}), times=1)
        expect(page.locator("#key-problem")).to_have_text("This key is not accepted.")
        expect(page.locator("#pulse-text")).to_have_text("locked")
        page.locator("#key").press("Enter")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.close()
    complaints.clear()


def test_a_browser_that_keeps_nothing_for_pages_gets_the_page(open_page: Open, complaints: list[str]):
    key = new_key()
    with fake_server(keys=[key]) as server:
        page = open_page(server.url + "/docs")
        page.add_init_script(NO_STORAGE)
        page.goto(server.url + "/console")
        page.locator("#key").fill(key)
        page.locator("#key").press("Enter")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.get_by_role("button", name="Switch to dark mode").click()
        expect(page.get_by_role("button", name="Switch to light mode")).to_be_visible()
        page.close()
    assert all("401" in text for text in complaints)
    complaints.clear()


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_and_errors_do_not_widen_the_page(
    pair: FakeServer, open_page: Open, complaints: list[str], width: int
):
    long, hostile = "x" * 250, "<img src=x onerror=alert(1)>\"'&"
    page = open_page(pair.url + "/docs", viewport={"width": width, "height": 700})
    for path in (FEED, MODELS, CONFIG):
        page.route(path, renaming(one=long, two=hostile))
    error = {"error": {"message": "y" * 500}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    page.goto(pair.url + "/console")
    expect(page.locator("#model option")).to_have_text([long, hostile])
    page.locator("#message").fill("hello")
    page.locator("#message").press("Enter")
    expect(page.locator(".turn .problem")).to_have_text("y" * 500)
    for view in ("chat", "live", "config"):
        page.locator(f"nav a[href='#{view}']").click()
        expect(page.locator(f"#{view}")).to_be_visible()
        assert set(page.evaluate(WIDTHS)) == {0}, view
    page.route(FEED, lambda route: route.fulfill(status=503, json=error))
    expect(page.locator("#pulse-text")).to_have_text("y" * 500)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    complaints.clear()


def test_the_documentation_shows_commands_that_do_what_they_say(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/docs")
    shown = page.locator("details", has_text=re.compile("^POST/stopService"))
    expect(shown.locator("pre")).to_have_text(f"curl -X POST {slow.url}/stopService")
    lines = page.locator("details pre")
    expect(lines.filter(has_text=re.compile(rf"^curl {slow.url}/v1/models$"))).to_have_count(1)
    expect(lines.filter(has_text=re.compile(rf"^curl {slow.url}/v1/chat/completions -H"))).to_have_count(1)
    expect(lines.filter(has_text=re.compile(rf"^curl -X DELETE {slow.url}/console/requests/"))).to_have_count(1)


@pytest.mark.parametrize("width", [320, 1280])
def test_the_documentation_does_not_scroll_sideways(slow: FakeServer, open_page: Open, width: int):
    page = open_page(slow.url + "/docs", viewport={"width": width, "height": 700})
    page.wait_for_selector("details")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_documentation_says_when_it_cannot_be_had(slow: FakeServer, open_page: Open, complaints: list[str]):
    page = open_page(slow.url + "/docs")
    for body in ('{"error": "no"}', "<p>Log in first"):
        page.route("**/openapi.json", partial(Route.fulfill, body=body))
        page.reload()
        expect(page.locator("main")).to_have_text("The server does not tell its routes; reload this page.")
    complaints.clear()
