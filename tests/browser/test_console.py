"""The console in a real browser, over the fake model."""

import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from kvloom.contract.config import TierConfig
from kvloom.server.secure.api_keys import new_key
from tests.browser.conftest import LIMIT_MS, Open
from tests.server.run.test_daemon import DAEMON, install
from tests.support.ports import free_port
from tests.support.processes import serving
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

expect.set_options(timeout=LIMIT_MS)

# the message field shows focus by its own border
FOCUSED = """() => {
    const element = document.activeElement;
    return [element.id || element.className, getComputedStyle(element).outlineStyle];
}"""


@pytest.fixture
def slow():
    """A server with long, slow answers."""
    with fake_server(has_eos=False, step_s=0.01, names=(MODEL,)) as server:
        yield server


def say(page: Page, text: str, max_tokens: int = 40) -> None:
    page.locator("#max_tokens").fill(str(max_tokens))
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def answer(page: Page):
    return page.locator(".answer").last


def done(page: Page) -> None:
    expect(answer(page)).to_have_attribute("aria-busy", "false")


def test_a_chat_is_streamed_and_the_conversation_goes_on(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/")
    assert page.url.endswith("/console")
    say(page, "hello", 300)
    page.wait_for_selector(".answer[aria-busy=true] .token")  # text, before it is done
    done(page)
    expect(page.locator(".meta")).to_contain_text("300 tokens · ")
    expect(page.locator(".meta")).to_contain_text("cut at the token limit")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "and more", 5)
    sent = asked.value.post_data_json
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["max_tokens"] == 5
    done(page)
    assert page.locator(".turn").count() == 4


def test_the_settings_are_what_is_sent(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console", viewport={"width": 1280, "height": 800})
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.3")
    page.locator("#top_p").fill("0.9")
    page.locator("#top_k").fill("40")
    page.locator("#seed").fill("7")
    expect(page.locator("#temperature-value")).to_have_text("0.30")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "hello", 3)
    sent = asked.value.post_data_json
    wanted = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "max_tokens": 3,
        "top_logprobs": 5,
        "stream": True,
    }
    assert {name: sent[name] for name in wanted} == wanted
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    done(page)


@pytest.mark.parametrize("how", ["escape", "button"])
def test_an_answer_can_be_stopped(slow: FakeServer, open_page: Open, how: str):
    page = open_page(slow.url + "/console")
    say(page, "hello", 1500)
    expect(answer(page)).to_have_text(re.compile("..."))
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    done(page)
    expect(page.locator(".meta")).to_contain_text("stopped")
    until(lambda: slow.engine.stats().num_running == 0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_request_of_somebody_else_is_cancelled_from_the_table(slow: FakeServer, open_page: Open):
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(slow.chat("my secret", max_tokens=1800)))
    client.start()
    page = open_page(slow.url + "/console#live")
    row = page.locator("#requests-body tr")
    expect(row).to_have_count(1)
    expect(row.locator(".col-state")).to_have_text("decode")
    first = int(row.locator(".col-generated").inner_text().replace(",", ""))
    expect(row.locator(".col-generated")).not_to_have_text(f"{first:,}")  # it moves
    assert "secret" not in page.content()
    row.get_by_role("button", name=re.compile("^Cancel request chatcmpl-")).click()
    client.join()
    expect(row).to_have_count(0)
    expect(page.locator("#requests-empty")).to_be_visible()
    [response] = answers
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_the_charts_move(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console#live")
    line = page.locator("#chart-output .line-0")
    expect(page.locator("#chart-requests strong")).to_have_text("0")
    client = threading.Thread(target=lambda: slow.complete("hello", max_tokens=2000))
    client.start()
    expect(page.locator("#chart-requests strong")).to_have_text("1")
    expect(line).to_have_attribute("d", re.compile("M.*L"))
    before = line.get_attribute("d")
    expect(line).not_to_have_attribute("d", before or "")
    expect(page.locator("#chart-output strong")).not_to_have_text("0")
    expect(page.locator("#chart-kv .second")).to_have_text("of 512")
    expect(page.locator("#chart-pool")).to_be_hidden()
    expect(page.locator("#pulse-text")).to_have_text("1 running")
    page.get_by_role("button", name="Cancel request").click()
    client.join()
    expect(page.locator("#chart-ttft strong")).not_to_have_text("–")
    expect(page.locator("#chart-requests strong")).to_have_text("0")
    page.locator("#chart-output .chart").hover()
    expect(page.locator("#chart-output .second")).to_contain_text("s ago")


def test_a_token_shows_what_else_was_likely(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console")
    page.locator("#temperature").fill("0")  # otherwise the answer may contain no letter
    say(page, "hello", 40)
    done(page)
    token = answer(page).locator(".token", has_text=re.compile("[a-z]")).first
    token.hover()
    tip = page.locator("#tip")
    expect(tip.locator("tr")).to_have_count(5)
    expect(tip.locator(".chosen")).to_contain_text(token.inner_text())
    expect(tip.locator(".chosen")).to_contain_text("60.7 %")  # the fake model's e**-0.5
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.locator("#message").focus()
    answer(page).focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    expect(tip).not_to_have_text(first)


def test_a_server_with_keys_asks_for_one(open_page: Open, complaints: list[str]):
    key = new_key()
    with fake_server(keys=[key]) as server:
        page = open_page(server.url + "/")
        field = page.locator("#key")
        expect(field).to_be_focused()
        field.fill("wrong-key-wrong-key-wrong-key")
        field.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("This key is not accepted.")
        field.fill(key)
        field.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.locator("#seed").fill("1")  # with another seed the answer could end at once
        say(page, "hello", 10)
        done(page)
        assert answer(page).inner_text()
        page.reload()
        expect(page.locator("#pulse-text")).to_have_text("ready")  # the tab keeps the key
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        page.close()  # it would complain of a server that is gone
    assert complaints, "a browser says of every 401 that it was one"
    assert all("401" in text for text in complaints)
    complaints.clear()


def test_dark_mode_is_the_systems_choice_or_the_readers(slow: FakeServer, open_page: Open):
    def ground(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = "rgb(248, 248, 245)", "rgb(20, 21, 23)"
    assert ground(open_page(slow.url + "/console", color_scheme="light")) == light
    page = open_page(slow.url + "/console", color_scheme="dark")
    assert ground(page) == dark
    page.get_by_role("button", name="Switch to light mode").click()
    assert ground(page) == light
    page.reload()
    assert ground(page) == light
    expect(page.get_by_role("button", name="Switch to dark mode")).to_be_visible()


def test_everything_is_reached_by_keyboard(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console", viewport={"width": 1280, "height": 800})
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("hello")
    page.locator("#max_tokens").fill("1500")
    page.locator("#message").focus()
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user")).to_have_text("hello\nagain")
    expect(answer(page)).to_have_text(re.compile("..."))
    page.keyboard.press("Escape")
    done(page)
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        reached.add(name)
        assert outline == "solid" or name in ("message", "log", ""), f"focus on {name} cannot be seen"
    assert {"brand", "theme", "answer", "message", "clear", "settings-toggle", "send"} <= reached
    assert {"system", "temperature", "top_p", "top_k", "max_tokens", "seed", "shade"} <= reached
    page.locator("nav a[href='#live']").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()


def test_an_error_is_one_line(slow: FakeServer, open_page: Open, complaints: list[str]):
    page = open_page(slow.url + "/console")
    say(page, "x" * 4000)
    expect(page.locator(".turn .problem")).to_have_text(
        re.compile(r"^This model\'s maximum context length is 2048 tokens\. However, your messages resulted in .*")
    )
    say(page, "short", 3)
    done(page)  # the refused one is not told again
    assert any("400" in text for text in complaints)
    complaints.clear()


def test_what_a_model_writes_is_text(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console")
    text = "# Title\n\nA **bold** `x` <img src=x onerror=alert(1)>\n\n```html\n<script>alert(1)</script>\n```\nend"
    drawn = page.evaluate(
        """async (text) => {
            const { Growing } = await import(new URL("console/text.js", document.baseURI));
            const element = document.createElement("div");
            const growing = new Growing(element);
            for (const letter of text) {
                growing.add(letter, [{ token: letter, logprob: -1, top_logprobs: [] }]);
                growing.draw();
            }
            const kinds = [...element.querySelectorAll(":not(span)")].map((one) => one.localName);
            return { kinds, texts: [...element.children].map((one) => one.textContent.trim()) };
        }""",
        text,
    )
    assert drawn["kinds"] == ["p", "p", "strong", "code", "pre", "code", "p"]
    assert drawn["texts"] == ["Title", "A bold x <img src=x onerror=alert(1)>", "<script>alert(1)</script>", "end"]


def test_reasoning_is_shown_apart_and_not_told_again(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console")
    deltas = [{"reasoning": "Let me "}, {"reasoning": "think."}, {"content": "Four."}]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    events = [json.dumps({"id": "x", "choices": [choice]}) for choice in choices]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    say(page, "two and two?")
    done(page)
    expect(page.locator(".thought .answer")).to_have_text("Let me think.")
    expect(answer(page)).to_have_text("Four.")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "sure?")
    assert asked.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Four."}
    done(page)


def test_several_models_can_be_chosen_from(open_page: Open):
    with fake_server(names=("one", "two")) as server:
        page = open_page(server.url + "/console", viewport={"width": 1280, "height": 800})
        page.locator("#model").select_option("two")
        say(page, "hello", 3)
        expect(page.locator(".turn h3")).to_have_text("two")
        done(page)
        page.locator("nav a[href='#live']").click()
        expect(page.locator("#live-model option")).to_have_text(["All models", "one", "two"])
        page.close()


def test_the_configuration_is_shown(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console#config")
    terms = page.locator("#config-groups dt")
    expect(terms.filter(has_text=re.compile("^max_link_num maxLinkNum$"))).to_have_count(1)  # config.json's name too
    expect(page.locator("#config-groups dd").filter(has_text="[object")).to_have_count(0)
    expect(page.locator("#config-groups h2")).to_have_text(["Server", f"Model {MODEL}"])


def test_the_kv_pool_is_drawn_when_there_is_one(open_page: Open):
    with fake_server(kv_tier=TierConfig("any:tier")) as server:
        page = open_page(server.url + "/console#live")
        expect(page.locator("#chart-pool")).to_be_visible()
        expect(page.locator("#chart-pool .second")).to_contain_text("saved")
        page.close()


def test_each_port_says_what_the_other_one_has(open_page: Open, complaints: list[str], tmp_path: Path):
    management = free_port()
    with serving([*DAEMON, "--config", str(install(tmp_path, managementPort=management))]) as daemon:
        page = open_page(daemon.url + "/console#live")
        expect(page.locator("#live-notice")).to_have_text("These figures are served on this server's management port.")
        page.locator("nav a[href='#chat']").click()
        say(page, "hello", 3)
        done(page)
        other = open_page(f"http://127.0.0.1:{management}/")
        expect(other.locator("#chat-notice")).to_have_text("Chat is served on this server's other port.")
        expect(other.locator("#pulse-text")).to_have_text("ready")
        page.close()
        other.close()
    assert all("404" in text for text in complaints)
    complaints.clear()


def test_a_lost_server_is_told_and_found_again(open_page: Open, complaints: list[str]):
    with fake_server() as server:
        page = open_page(server.url + "/console#live")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.route("**/console/feed", lambda route: route.abort())
        expect(page.locator("#pulse-text")).to_have_text("the server cannot be reached")
        page.unroute("**/console/feed")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        page.close()
    complaints.clear()


def test_a_narrow_page_does_not_scroll_sideways(slow: FakeServer, open_page: Open):
    page = open_page(slow.url + "/console", viewport={"width": 360, "height": 700})
    for view in ("chat", "live", "config"):
        page.locator(f"nav a[href='#{view}']").click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#settings").is_hidden()
