"""The script that makes the pictures: what of a terminal's output is on the screen, and the page."""

import re
import sys

from tools import pictures

BAR = "━━\x1b[2m━\x1b[0m"
RAW = f"loading\r\nstep 1\r\n\r\x1b[Kstep 371/400  {BAR}\r\x1b[Kstep 379/400  {BAR}\r\x1b[Kdone\r\n"


def test_the_screen_is_that_of_the_last_such_moment():
    lines = pictures.screen_at(RAW, re.compile(r"step 37\d/"))
    assert lines == ["loading", "step 1", f"step 379/400  {BAR}"]
    assert pictures._only_dim(lines[-1]) == " " * 16 + "━"
    assert pictures._only_dim("step 1") == ""


def test_lines_become_a_png(tmp_path):
    pictures.draw(["$ shoal", f"step 1  {BAR}"], tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_is_shown_on_a_terminal_of_80_columns(tmp_path):
    script = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty(), os.getcwd())"
    shown = pictures.on_terminal([sys.executable, "-c", script], tmp_path)
    assert shown.split() == ["80", "True", str(tmp_path)]


def test_without_chromium_the_page_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "CHROMIUM", ("no-such-browser",))
    assert pictures.photograph_page(tmp_path, tmp_path / "page.png").startswith("no Chromium on this machine")


def test_chromium_is_led_to_the_page_of_the_server(tmp_path, monkeypatch):
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\nfor last; do :; done\necho "$last" > "$(echo "$5" | cut -d= -f2)"\n')
    browser.chmod(0o755)
    serve = "import time; print('serving at http://127.0.0.1:7/ (API)', flush=True); time.sleep(60)"
    monkeypatch.setattr(pictures, "shoal", lambda *_: [sys.executable, "-c", serve])
    monkeypatch.setattr(pictures, "CHROMIUM", (str(browser),))
    assert pictures.photograph_page(tmp_path, tmp_path / "page.png") == ""
    assert (tmp_path / "page.png").read_text() == "http://127.0.0.1:7/\n"
