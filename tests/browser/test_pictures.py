"""The page of pictures in a real browser, over a tiny pipeline beside the mock language model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open
from tests.support.processes import ServeProcess, serve

LIMIT_MS = 120_000  # the first picture may take this long on a busy machine
FAKE = ("--backend", "fake", "--served-model-name", "mock")


@pytest.fixture(scope="module")
def running(tiny_pipeline: Path) -> Iterator[ServeProcess]:
    with serve(*FAKE, "--image-model", f"sd={tiny_pipeline}") as process:
        yield process


def paint(page: Page, prompt: str, **fields: str) -> None:
    page.locator("#picture-prompt").fill(prompt)
    for name, value in fields.items():
        page.locator(f"#picture-{name}").fill(value)
    page.locator("#paint").click()


def test_a_picture_is_painted_and_shown(running: ServeProcess, open_page: Open):
    page = open_page(running.url + "/console")
    page.locator("#pictures-link").click()
    paint(page, "a <b>cat</b>", steps="4", seed="7", count="2", size="64x48")
    done = page.locator('#gallery figure[aria-busy="false"]')
    expect(done).to_have_count(2, timeout=LIMIT_MS)
    script = "images => images.map(image => [image.naturalWidth, image.naturalHeight, image.alt])"
    assert page.locator("#gallery img").evaluate_all(script) == [[64, 48, "a <b>cat</b>"]] * 2
    expect(done.first).to_contain_text("64x48 · seed 8 · ")
    expect(done.last).to_contain_text("64x48 · seed 7 · ")
    expect(page.locator("#paint")).to_have_text("Paint")


def test_pictures_that_are_stopped_leave_and_others_can_be_painted(running: ServeProcess, open_page: Open):
    page = open_page(running.url + "/console#pictures")
    expect(page.locator("#pictures-link")).to_be_visible()
    paint(page, "a cat", steps="24", count="10")
    expect(page.locator('#gallery figure[aria-busy="true"]')).to_have_count(1, timeout=LIMIT_MS)
    page.locator("#paint").click()
    expect(page.locator("#paint")).to_have_text("Paint")
    expect(page.locator('#gallery figure[aria-busy="true"]')).to_have_count(0)
    paint(page, "a dog", steps="2", count="1")
    expect(page.locator('#gallery figure[aria-busy="false"] img[alt="a dog"]')).to_have_count(1, timeout=LIMIT_MS)


def test_a_refusal_is_told(running: ServeProcess, open_page: Open, complaints: list[str]):
    page = open_page(running.url + "/console#pictures")
    paint(page, "a cat", size="61x64")
    expect(page.locator("#picture-problem")).to_have_text("size: must be multiples of 8, got 61x64")
    complaints.clear()  # the browser's own line about the status 400


def test_without_such_a_model_there_is_no_such_page(open_page: Open):
    with serve(*FAKE) as server:
        page = open_page(server.url + "/console")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        expect(page.locator("#pictures-link")).to_be_hidden()
        page.close()  # it would complain of a server that is gone
