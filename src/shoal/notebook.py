"""What `import shoal` offers to notebooks and scripts: prepare, train, read_metrics, load.

`prepare` and `train` run the `shoal` command in a process of its own and print its output: `nproc` works as
on the command line, and a process that runs out of memory does not end the notebook. When the notebook is
interrupted, `train` saves a checkpoint; the same call continues from it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from shoal.config.load import load_config, to_toml
from shoal.config.sections import Config
from shoal.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, InputError, ShoalError

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer
    from shoal.infer.load import TextModel
    from shoal.models.decoder import Decoder

Paths = str | Path | Sequence[str | Path]


def prepare(inputs: Paths, output: str | Path, **options: Any) -> Path:
    """Turn text into a dataset folder and return it; a complete one is left as it is.

    `options` are those of `shoal prepare`, with underscores: `tokenizer="bpe", vocab_size=4096, web=True`.

    Raises:
        ShoalError: The command failed; the message is the command's own.

    Example: shoal.prepare(["notes.txt", "books/"], "datasets/mine", vocab_size=4096)
    """
    words: list[object] = ["prepare", *_listed(inputs), "--output", output]
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *(() if value is True else _listed(value))]
    _run(words)
    return Path(output)


def train(
    config: str | Path | Config,
    *,
    data: Paths = (),
    run_dir: str | Path,
    nproc: int = 1,
    init: str | Path | None = None,
    **settings: Any,
) -> Path:
    """Train until the last step, or continue a run; return the run folder.

    `config` is the name of a preset, a TOML file or a `Config`; `data` one dataset folder or several; `nproc`
    the number of processes on this machine; `init` a run or checkpoint whose weights a new run starts from.
    `settings` override the configuration: `train={"steps": 100}`, or `**{"train.steps": 100}`.

    Raises:
        ConfigError: A setting is unknown or not allowed.
        ShoalError: The command failed; the message is the command's own.

    Example: shoal.train("tiny", data="datasets/mine", run_dir="runs/first", train={"steps": 200})
    """
    sections = _sections(settings)
    if datasets := _listed(data):
        sections.setdefault("data", {})["datasets"] = [str(Path(folder).absolute()) for folder in datasets]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        if isinstance(config, Config):
            file.write_text(to_toml(config, given_only=True), encoding="utf-8")
            config = file
        given = to_toml(load_config(str(config), sections), given_only=True)
        file.write_text(given, encoding="utf-8")
        optional = [("--nproc", nproc if nproc != 1 else None), ("--init", init)]
        words = [word for name, value in optional if value is not None for word in (name, value)]
        _run(["train", file, "--run-dir", run_dir, *words])
    return Path(run_dir)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run folder's metrics.jsonl, oldest first; each has at least "step".

    A step has "loss" (nats per token), "lr" and "grad_norm"; an evaluation has "validation_loss".

    Example: [(one["step"], one["loss"]) for one in shoal.read_metrics("runs/first") if "loss" in one]
    """
    file = Path(run) / "metrics.jsonl"
    if not file.is_file():
        raise InputError(f"{file} does not exist", hint="give the folder of a run that has begun")
    from shoal.train.metrics import read_metrics as read

    return read(file)


def load(path: str | Path, device: Literal["auto", "cpu", "cuda"] = "auto") -> LoadedModel:
    """Load the newest good checkpoint of a run folder, one checkpoint, or a Hugging Face folder.

    Raises:
        ShoalError: There is no such model, or its files are damaged.

    Example: shoal.load("runs/first").generate("def main(", max_tokens=100, temperature=0.8)
    """
    from shoal.infer.load import load_text_model
    from shoal.runtime.device import select_device

    return LoadedModel(load_text_model(Path(path), select_device(device, 0, 1).torch_device))


@dataclass(frozen=True)
class LoadedModel:
    """A trained model with its tokenizer."""

    text_model: TextModel

    @property
    def model(self) -> Decoder:
        """The `torch.nn.Module`: token ids int64 [batch, time] to logits [batch, time, padded vocabulary]."""
        return self.text_model.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, with `encode(text)` and `decode(ids)`."""
        return self.text_model.tokenizer

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return the text that follows a prompt: `max_tokens` tokens, or fewer where the document ends.

        Temperature 0 is greedy; `top_k` 0 and `top_p` 1 are off. The same seed gives the same text. A text
        longer than the model's positions continues on a sliding window.
        """
        from shoal.infer.sampling import Sampling
        from shoal.infer.terminal import GenerateOptions
        from shoal.infer.text import complete

        options = GenerateOptions(Sampling(temperature, top_k, top_p, seed), max_tokens)
        rows = options.rows(self.text_model, prompt)
        return next(complete(self.text_model, rows, options.sampling, 1)).text

    def loss(self, text: str) -> float:
        """Return the mean loss of a text in nats per token; `math.exp` of it is the perplexity."""
        from shoal.infer.evaluate import of_text
        from shoal.infer.measure import Measure

        return float(of_text(self.text_model, text, Measure())["loss"])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _sections(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {section: {field: value}} of settings that name a field with a dot, or hold a section."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, dot, field = name.partition(".")
        if not dot and not isinstance(value, Mapping):
            raise ConfigError(
                f"{name}={value!r} is not a section of the configuration",
                hint='name the section, as in train={"steps": 100}',
            )
        sections.setdefault(section, {}).update({field: value} if dot else value)
    return sections


def _run(words: Sequence[object]) -> None:
    """Run a `shoal` command to its end, printing its lines; a ShoalError has what it said last.

    An interrupt is sent to all processes of a notebook, or of a terminal. Where the command did not get it, a
    second one is passed on. KeyboardInterrupt is raised when the command has ended.
    """
    command = [sys.executable, "-u", "-m", "shoal", *map(str, words)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    said: deque[str] = deque(maxlen=40)
    with subprocess.Popen(command, text=True, errors="replace", **pipes) as child:
        assert child.stdout is not None
        with _interrupts_of(child) as interrupts:
            for line in child.stdout:
                print(line, end="", flush=True)
                said.append(line)
    if interrupts:
        raise KeyboardInterrupt
    if child.returncode not in (EXIT_DONE, EXIT_STOPPED):
        message = "".join(said).rpartition("error: ")[2].strip()
        raise ShoalError(f"`shoal {words[0]}` ended with status {child.returncode}: {message}")


@contextmanager
def _interrupts_of(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Collect interrupts while the block runs, and pass all but the first on. Other threads get none."""
    interrupts: list[int] = []

    def interrupted(number: int, _frame: object) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
