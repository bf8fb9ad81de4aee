"""A page of another origin, in a real browser, tries every way to use a server on this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page

from kvloom.net.sites import Policy, checked_hosts, checked_origins
from tests.browser.conftest import LIMIT_MS, REBOUND
from tests.support.servers import MODEL, FakeServer, fake_server

# the result of each attempt as the page sees it: a status, or a word
ATTACKS = """async ([url, body]) => {
    const image = (path) => new Promise((done) => {
        const element = new Image();
        element.onload = () => done("shown");
        element.onerror = () => done("no image");
        element.src = url + path;
    });
    const form = (path) => new Promise((done) => {
        const frame = document.createElement("iframe");
        frame.name = "target";
        const element = document.createElement("form");
        Object.assign(element, { method: "post", action: url + path, enctype: "text/plain", target: "target" });
        const input = document.createElement("input");
        Object.assign(input, { name: body.slice(0, -1) + ',"x":"', value: '"}' });
        element.append(input);
        document.body.append(frame, element);
        frame.onload = () => done("sent");
        element.submit();
    });
    const ask = async (path, options) => {
        try {
            return (await fetch(url + path, options)).status;
        } catch {
            return "blocked";
        }
    };
    const json = { "Content-Type": "application/json" };
    return {
        image: await image("/stopService?mode=Force"),
        form: await form("/v1/completions"),
        blind: await ask("/v1/completions", { method: "POST", mode: "no-cors", body }),
        untyped: await ask("/v1/completions", { method: "POST", mode: "no-cors", body: new Blob([body]) }),
        json: await ask("/v1/completions", { method: "POST", headers: json, body }),
        stop: await ask("/stopService", { method: "POST", mode: "no-cors" }),
        read: await ask("/v1/models", {}),
        cancel: await ask("/console/requests/a", { method: "DELETE" }),
    };
}"""
BODY = f'{{"model":"{MODEL}","prompt":"hi","max_tokens":1}}'


class Blank(BaseHTTPRequestHandler):
    """Serves an empty page without any security policy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def blank_site() -> Iterator[int]:
    """A site of blank pages; its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_address[1]
        site.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(LIMIT_MS)
    yield found
    context.close()


def is_untouched(server: FakeServer) -> bool:
    return not server.health.is_draining and server.engine.stats().total_requests == 0


@pytest.mark.parametrize("host", ["127.0.0.1", REBOUND])  # the same site on another port, and another site
def test_a_page_of_another_origin_reaches_nothing(page: Page, host: str):
    with fake_server() as server, blank_site() as port:
        page.goto(f"http://{host}:{port}/")
        learnt = page.evaluate(ATTACKS, [server.url, BODY])
        opaque = 0  # the status of a no-cors fetch, whatever the answer
        assert learnt == {
            "image": "no image",
            "form": "sent",
            "blind": opaque,
            "untyped": opaque,
            "json": "blocked",
            "stop": opaque,
            "read": "blocked",
            "cancel": "blocked",
        }
        assert is_untouched(server)


def test_it_is_the_server_that_refuses_not_the_browser(page: Page):
    """The same page gets answers from a server that allows its origin."""
    policy = Policy(checked_hosts(["*"]), checked_origins(["*"]))
    with fake_server(policy=policy) as server, blank_site() as port:
        page.goto(f"http://{REBOUND}:{port}/")
        learnt = page.evaluate(ATTACKS, [server.url, BODY])
        assert (learnt["json"], server.engine.stats().total_requests) == (200, 2)  # json and untyped
        assert server.health.is_draining


def test_a_name_of_the_attackers_that_leads_here_is_refused(page: Page):
    with fake_server() as server:
        port = server.url.rpartition(":")[2]
        answer = page.goto(f"http://{REBOUND}:{port}/v1/models")
        assert answer is not None
        assert answer.status == 421
        learnt = page.evaluate(ATTACKS, ["", BODY])  # same origin, so the page reads every answer
        assert {learnt[name] for name in ("blind", "untyped", "json", "stop", "read", "cancel")} == {421}
        assert is_untouched(server)


def test_a_link_of_another_site_leads_to_the_console(page: Page):
    with fake_server() as server, blank_site() as port:
        page.goto(f"http://{REBOUND}:{port}/")
        page.set_content(f'<a href="{server.url}/">the console</a>')
        page.get_by_text("the console").click()
        page.wait_for_url(f"{server.url}/console")
        page.wait_for_selector("#message")
        page.goto(f"http://{REBOUND}:{port}/")
        page.set_content(f'<a href="{server.url}/stopService">a kitten</a>')
        page.get_by_text("a kitten").click()
        page.wait_for_url(f"{server.url}/stopService")
        assert is_untouched(server)
