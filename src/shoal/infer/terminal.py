"""The three ways to ask for text: a prompt, a JSONL file of prompts, a conversation."""

from __future__ import annotations

import io
import json
import sys
import time
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DataError, InputError, counted
from shoal.infer.distributed import load_distributed
from shoal.infer.generate import GeneratedRow
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling
from shoal.infer.text import complete, prompt_rows, stream
from shoal.runtime.files import atomic_write


@dataclass(frozen=True)
class GenerateOptions:
    """How much text is asked for; an InputError names a value out of range."""

    sampling: Sampling
    max_tokens: int | None = None  # None: 256
    samples: int = 1
    batch_size: int = 16
    max_length_error: bool = False  # reject what is longer than the model's positions

    def __post_init__(self) -> None:
        counts = {"max-tokens": self.max_tokens, "samples": self.samples, "batch-size": self.batch_size}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise InputError(f"--{name} {value} is not allowed", hint="use 1 or more")
        if self.sampling.greedy and self.samples > 1:
            raise InputError(
                f"--greedy or --temperature 0 would give the same text {self.samples} times",
                hint="use a temperature above 0, or leave --samples out",
            )

    def rows(self, loaded: TextModel, prompt: str, number: int = 0) -> list[GeneratedRow]:
        """Return a row for each sample of a prompt."""
        return prompt_rows(
            loaded,
            prompt,
            number=number,
            samples=self.samples,
            max_tokens=self.max_tokens,
            strict=self.max_length_error,
        )


def run(
    path: Path,
    prompt: str | None,
    source: Path | None,
    target: Path | None,
    device: str,
    tp: int,
    options: GenerateOptions,
) -> None:
    """Load a run or checkpoint and answer in the way that the arguments ask for."""
    if prompt is not None and source is not None:
        raise InputError("--prompt and --input were both given", hint="choose one of them")
    if target is not None and source is None:
        raise InputError("--output needs --input, a JSONL file of prompts")
    if source is not None:
        read_prompts(source)  # a bad line is told before the model is loaded
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")  # neither odd input nor a poor locale ends a conversation
    with load_distributed(path, device, tp) as loaded:
        print(f"{loaded.checkpoint}: {loaded.model.shape.max_seq_len} positions", file=sys.stderr)
        if source is not None:
            answer_file(loaded, source, target, options)
        elif prompt is not None:
            answer(loaded, prompt, options)
        else:
            converse(loaded, sys.stdin, options, ask=sys.stdin.isatty())


def answer(loaded: TextModel, prompt: str, options: GenerateOptions) -> None:
    """Print a prompt with its continuation as it is made, or several samples one after the other."""
    rows = options.rows(loaded, prompt)
    if options.samples == 1:
        _print_stream(loaded, prompt, rows[0], options.sampling)
        return
    for number, completion in enumerate(
        complete(loaded, rows, options.sampling, options.batch_size), start=1
    ):
        print(f"--- {number} of {options.samples}\n{_for_screen(prompt + completion.text)}", flush=True)


def converse(loaded: TextModel, lines: Iterable[str], options: GenerateOptions, *, ask: bool) -> None:
    """Continue each line that is typed, until `stop` alone or the end of the file; `ask` prints "> "."""
    if ask:
        print("Enter a prompt (type `stop` to quit).\n> ", end="", flush=True)
    for number, line in enumerate(lines):
        prompt = line.rstrip("\r\n")
        if prompt.strip() == "stop":
            return
        if prompt.strip():
            try:
                _print_stream(loaded, prompt, options.rows(loaded, prompt, number)[0], options.sampling)
            except InputError as error:  # too long a prompt is no reason to leave
                print(f"error: {error}", file=sys.stderr)
        if ask:
            print("> ", end="", flush=True)
    if ask:
        print()


def answer_file(loaded: TextModel, source: Path, target: Path | None, options: GenerateOptions) -> None:
    """Complete a JSONL file of {"prompt": ...}; write each line again with its "completions".

    Without `target` the lines go to stdout. The target appears when it is complete.
    """
    started = time.perf_counter()
    records = read_prompts(source)
    rows = [
        row for number in range(len(records)) for row in _rows_of(loaded, records, number, options, source)
    ]
    done = list(complete(loaded, rows, options.sampling, options.batch_size))
    lines = []
    for number, (_, record) in enumerate(records):
        own = done[number * options.samples : (number + 1) * options.samples]
        answered = {**record, "completions": [asdict(completion) for completion in own]}
        lines.append(json.dumps(answered, ensure_ascii=False) + "\n")
    _write_lines(lines, target)
    num_tokens, took_s = sum(completion.num_tokens for completion in done), time.perf_counter() - started
    print(
        f"{counted(len(records), 'prompt')}, {counted(len(done), 'completion')}, "
        f"{counted(num_tokens, 'token')} in {took_s:.1f} s",
        file=sys.stderr,
    )


def read_prompts(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read (line number, object) from a JSONL file; a DataError names the first line without a "prompt"."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    records = [(n, _record(line, f"{path}, line {n}")) for n, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise DataError(f"{path} holds no prompt", hint='write one JSON object a line: {"prompt": "Once"}')
    return records


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}", hint='write {"prompt": "Once"}') from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object", hint='write {"prompt": "Once"}')
    if not isinstance(record.get("prompt"), str):
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f'{where}: no text under the key "prompt"', hint=f"its keys: {keys}")
    return record


def _rows_of(
    loaded: TextModel,
    records: list[tuple[int, dict[str, Any]]],
    number: int,
    options: GenerateOptions,
    source: Path,
) -> list[GeneratedRow]:
    line, record = records[number]
    try:
        return options.rows(loaded, record["prompt"], number)
    except InputError as error:
        raise InputError(f"{source}, line {line}: {error.message}", hint=error.hint) from error


def _write_lines(lines: list[str], target: Path | None) -> None:
    if target is None:
        sys.stdout.writelines(lines)
        return
    with atomic_write(target) as file:
        file.writelines(line.encode() for line in lines)


def _print_stream(loaded: TextModel, prompt: str, row: GeneratedRow, sampling: Sampling) -> None:
    print(_for_screen(prompt), end="", flush=True)
    for piece in stream(loaded, row, sampling):
        print(_for_screen(piece), end="", flush=True)
    print()


def _for_screen(text: str) -> str:
    """Show control characters as U+FFFD on a terminal, where a model's escape sequences would do things."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
