"""Where the lines of metrics.jsonl go as well: TensorBoard, Weights & Biases, trackio, any number at once.

Each sink has a thread and a bounded queue of its own, so that nothing it does, waits for or raises holds
training up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.runtime.files import reading, write_text
from shoal.runtime.log import log

# The first that matches; what matches none is in train/.
_GROUPS = {"memory": "_bytes(_rank)?$", "speed": "_per_s|^mfu|^step_ms$", "time": "_m?s(_rank)?$|^seconds$"}
_QUEUE_LINES = 1000  # some 5 MB; what a sink cannot keep up with is left out
_CLOSE_S = 30.0  # for what is still queued at the end of a run, and for the sink's own farewell
Figures = dict[str, float | str]  # by names that begin with their group; a sample of text is among them


class Sink(Protocol):
    """A place for metrics. Made and used in one thread."""

    def write(self, step: int, values: Figures) -> None:
        """Take the figures of a step; a step may come several times, with other figures."""

    def close(self) -> None:
        """Send what is left."""


def require_sinks(names: tuple[str, ...]) -> None:
    """Refuse a sink whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"train.sinks names {name}, which is not installed", hint=f"pip install 'shoal[{name}]'"
            )


def grouped(name: str) -> str:
    """Return a figure's name in its group, such as train/loss, validation/loss or speed/tokens_per_s."""
    if name.startswith(("validation_", "test_", "sync_")):
        return name.replace("_", "/", 1)
    return f"{next((g for g, pattern in _GROUPS.items() if re.search(pattern, name)), 'train')}/{name}"


class Sinks:
    """All sinks of a run. One rank has them; on the others `names` is empty."""

    def __init__(self, names: tuple[str, ...], config: Config, run_dir: Path) -> None:
        self._names = dict.fromkeys(names)  # each once
        self._config = config
        self._run_dir = run_dir
        self._feeds: list[_Feed] = []

    def start(self, step: int) -> None:
        """Open the sinks for what comes after `step`."""
        run = _run_name(self._run_dir) if self._names.keys() - {"tensorboard"} else ""
        openers: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: _TensorBoard(self._run_dir / "tensorboard", step + 1),
            "wandb": lambda: _Wandb(self._config, run),
            "trackio": lambda: _Trackio(self._config, run),
        }
        self._feeds = [_Feed(name, openers[name]) for name in self._names]

    def put(self, line: dict[str, Any]) -> None:
        """Hand the figures of a line on; returns at once."""
        step = line["step"]
        for feed in self._feeds:
            shown = {n: v for n, v in line.items() if n != "step" and isinstance(v, int | float | str)}
            feed.put(step, {grouped(name): value for name, value in shown.items()})

    def close(self) -> None:
        """Let each sink finish, for a limited time."""
        for feed in self._feeds:
            feed.close()
        self._feeds = []


class _Feed:
    """The thread and the queue of one sink."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._make = make
        self._queue: Queue[tuple[int, Figures] | None] = Queue(_QUEUE_LINES)
        self._left_out = 0
        self._thread = Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Figures) -> None:
        try:
            self._queue.put_nowait((step, values))
        except Full:
            self._left_out += self._thread.is_alive()  # a dead one has said so

    def close(self) -> None:
        until = time.monotonic() + _CLOSE_S
        if self._thread.is_alive():
            with contextlib.suppress(Full):  # a stuck thread does not outlive the process
                self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            log.warning(f"warning: {self._name} did not finish in {_CLOSE_S:g} s and is abandoned")
        if self._left_out:
            log.warning(f"warning: {self._name} could not keep up: {self._left_out} lines left out")

    def _serve(self) -> None:
        try:
            sink = self._make()
            while (item := self._queue.get()) is not None:
                sink.write(*item)
            sink.close()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            log.warning(
                f"warning: {self._name} gets no more metrics ({reason}); "
                "training continues, and metrics.jsonl has everything"
            )


class _TensorBoard:
    """Event files in the run folder; a resumed run hides what an earlier attempt wrote after its step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=5)

    def write(self, step: int, values: Figures) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run at Weights & Biases, which the same run folder goes on with; WANDB_MODE=offline keeps it here."""

    def __init__(self, config: Config, name: str) -> None:
        import wandb

        self._run = wandb.init(
            project=config.train.project,
            id=name,
            name=name,
            resume="allow",
            config=config.model_dump(),
            settings=wandb.Settings(console="off", quiet=True),
        )

    def write(self, step: int, values: Figures) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run in trackio's local store, or where its own variables point."""

    def __init__(self, config: Config, name: str) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=config.train.project, name=name, resume="allow", config=config.model_dump(), embed=False
        )

    def write(self, step: int, values: Figures) -> None:
        self._trackio.log(values, step=step)

    def close(self) -> None:
        self._trackio.finish()


def _run_name(run_dir: Path) -> str:
    """Return the name that services know this run folder by, the same after a resume."""
    file = run_dir / "sinks-name"
    name = ""
    if file.exists():
        with reading(file):
            name = file.read_text(encoding="utf-8", errors="replace").strip()
    if not name.isprintable() or name in ("", "\ufffd"):  # none yet, or not what was written here
        name = f"{run_dir.name}-{uuid.uuid4().hex[:6]}"
        write_text(file, f"{name}\n")
    return name
