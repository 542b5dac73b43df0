"""Make the pictures in docs/pictures: a run on a terminal, its loss curve, the page of `shoal serve`.

    python -m tools.pictures TEXT [FOLDER]

It trains `tiny` on a text for a minute or two. The page needs Chromium, and is left out where there is none.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

COLUMNS = 80
BEGIN = ("train", "tiny", "--data", "my-text", "--nproc", "2", "--eval.prompt", "ROMEO:")
SETTINGS = ("--steps", "400", "--train.log_every", "50", "--eval.every", "100")
RUN = "runs/tiny-my-text"
PICTURED = re.compile(r"step 37\d/")  # the progress line that is seen in the picture
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DIM = re.compile(r"\x1b\[2m(.*?)\x1b\[0m")
CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def shoal(*arguments: object) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "shoal", *map(str, arguments)]


def on_terminal(command: Sequence[str], folder: Path) -> str:
    """Run a command on a terminal of 80 columns; return all that was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    content = bytearray()
    try:
        while more := os.read(ours, 1 << 16):
            content += more
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    if process.wait():
        raise SystemExit(f"the run ended with status {process.returncode}:\n{content.decode()}")
    return content.decode(errors="replace")


def screen_at(raw: str, moment: re.Pattern[str]) -> list[str]:
    """Return the lines of the screen when something was written last, colours included."""
    raw = raw.replace("\r\n", "\n")
    *_, last = moment.finditer(raw)
    end = re.compile(r"\r|\n|$").search(raw, last.end())
    assert end is not None
    return [line.split("\r\x1b[K")[-1] for line in raw[: end.start()].split("\n")]


def draw(lines: Sequence[str], path: Path) -> None:
    """Draw lines of a terminal into a PNG."""
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib brings it

    height = 0.19 * (len(lines) + 1)
    figure = Figure(figsize=(6.7, height), facecolor="#16181d")
    layers = (("#d8dee9", DIM.sub(lambda found: " " * len(found[1]), line)) for line in lines)
    dimmed = (("#4c566a", _only_dim(line)) for line in lines)
    for place, row in enumerate(zip(layers, dimmed, strict=True)):
        for colour, text in row:
            y = 1 - (0.19 * (place + 1)) / height
            figure.text(
                0.02, y, CONTROL.sub("", text), color=colour, family="monospace", size=9.3, parse_math=False
            )
    figure.savefig(path, dpi=130)
    Image.open(path).convert("RGB").quantize(32).save(path, optimize=True)  # a third of the bytes


def _only_dim(line: str) -> str:
    """Return a line with all but its dim part blank."""
    found = DIM.search(line)
    return " " * len(CONTROL.sub("", line[: found.start()])) + found[1] if found else ""


def photograph_page(run: Path, path: Path) -> str:
    """Have Chromium make a picture of the page of `shoal serve`; return why there is none."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        return "no Chromium on this machine: the page of `shoal serve` is left out"
    with subprocess.Popen(shoal("serve", run, "--port", "0"), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+?/", line)))
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,700"]
            subprocess.run([browser, *options, f"--screenshot={path}", url], check=True, timeout=120)
        finally:
            server.send_signal(signal.SIGINT)
    return ""


def main(text: Path, folder: Path) -> None:
    """Make all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        base = Path(temporary)
        prepare = ("prepare", text.absolute(), "--output", "my-text", "--vocab-size", "512")
        subprocess.run(shoal(*prepare), cwd=base, check=True, stdout=subprocess.DEVNULL)
        screen = screen_at(on_terminal(shoal(*BEGIN, *SETTINGS), base), PICTURED)
        draw([f"$ shoal {shlex.join(BEGIN)} \\", f"    {shlex.join(SETTINGS)}", *screen], folder / "run.png")
        shutil.copy(base / RUN / "loss.png", folder / "loss.png")
        print(photograph_page(base / RUN, folder / "page.png") or "all pictures are made")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(*sys.argv[2:] or ["docs/pictures"]))
