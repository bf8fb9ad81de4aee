"""A headless Chromium of the system. Without one these tests are skipped; CI installs it (`make browser`)."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

LIMIT_MS = 120_000
REBOUND = "evil.example"  # an attacker's host name that resolves to this machine
Open = Callable[..., Page]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium. It does not live for the whole session, because Playwright runs an event loop in this thread.

    The files of this folder run one after the other, see TOGETHER in tests/conftest.py.
    """
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no chromium; run: make browser")
        pytest.skip("there is no chromium; run: make browser")
    with sync_playwright() as playwright:
        rebound = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", rebound]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """Errors that this test's pages wrote to the browser's console or raised. A test that expects some clears them."""
    return []


@pytest.fixture
def open_page(browser: Browser, complaints: list[str]) -> Iterator[Open]:
    """Opens pages, each in its own context; the test fails if `complaints` is not empty at its end."""
    contexts = []

    def open(url: str, **context: object) -> Page:
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT_MS)

        def heard(message: ConsoleMessage) -> None:
            if message.type == "error":
                complaints.append(message.text)

        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert complaints == []
