"""The page of `shoal serve`, in a browser without a window."""

from __future__ import annotations

import shutil

import pytest
import torch
from playwright.sync_api import sync_playwright

from shoal.infer.load import load_text_model
from tests.infer.serving import serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page was not tried")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_text_model(trained_run, torch.device("cpu"))


def shows(page, at, words):
    there = "([at, words]) => document.querySelector(at).textContent.includes(words)"
    page.wait_for_function(there, arg=[at, words], timeout=15_000)


def set_slider(page, name, value):
    move = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }"
    page.eval_on_selector(f"#{name}", move, value)


def test_text_arrives_as_it_is_made_and_can_be_stopped(browser, loaded):
    with serving(loaded) as running:
        page, told = browser.new_page(), []
        page.on("console", lambda message: told.append(message.text))
        page.on(
            "request", lambda request: told.append(request.url) if running.url not in request.url else None
        )
        page.goto(running.url)
        shows(page, "#model", "run")
        assert not page.is_visible("#token")
        page.fill("#prompt", "ab")
        for name, value in (("temperature", "0"), ("top_p", "0.5"), ("max_tokens", "40")):
            set_slider(page, name, value)
            assert page.text_content(f"#{name}-shown") == value
        page.click("#go")
        shows(page, "#told", "40 tokens")
        greedy = running.post(prompt="ab", temperature=0, max_tokens=40).json()["choices"][0]["text"]
        assert page.text_content("#text") == "ab" + greedy
        assert page.locator("#text .made").count() > 5

        running.step_s = 0.2
        page.press("#prompt", "Control+Enter")
        page.wait_for_selector("#text .made")
        page.click("#stop")
        shows(page, "#told", "stopped")
        assert 0 < page.locator("#text .made").count() < 30
        running.step_s = 0.0
        set_slider(page, "max_tokens", "1000")  # as far as the model's positions go
        page.click("#go")
        shows(page, "#told", "62 tokens")  # beside a prompt of 2, with 64 positions
        page.fill("#prompt", "a" * 64)
        page.click("#go")
        shows(page, "#told", "the prompt has 64 tokens: with the text, at most 64 fit")
        assert told == []  # nothing was fetched from elsewhere, no error was shown


def test_the_page_asks_for_the_token_where_the_server_does(browser, loaded):
    with serving(loaded, token="a-long-random-word") as running:
        page = browser.new_page()
        page.goto(running.url)
        shows(page, "#told", "Authorization: Bearer")
        page.fill("#token", "a-long-random-word")
        page.press("#token", "Tab")
        shows(page, "#model", "run")
        page.fill("#prompt", "<b>ab</b>")
        set_slider(page, "max_tokens", "20")
        set_slider(page, "temperature", "0")  # a text that is drawn may be of spaces, which are not seen
        page.click("#go")
        page.wait_for_selector("#text .made")
        assert page.text_content("#text").startswith("<b>ab</b>")
