"""`shoal evaluate`: perplexity of a text or a split, WikiText's by words, LAMBADA's last words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shoal.checkpoint.manifest import STATE, read_state
from shoal.data.dataset import open_dataset
from shoal.data.identity import refuse_other_tokenizer
from shoal.data.texts import read_passages, read_text, undo_moses
from shoal.errors import DataError, InputError
from shoal.infer.distributed import load_distributed
from shoal.infer.load import TextModel
from shoal.infer.measure import Found, Measure, score_all
from shoal.infer.score import Span, sliding_spans
from shoal.runtime.files import check_targets, read_json, write_json
from shoal.scoring import perplexity


def run(path: Path, measure: Measure, device: str, tp: int, nproc: int, json_file: Path | None) -> None:
    """Measure a run, checkpoint or Hugging Face folder; print a table, write JSON beside the checkpoint."""
    check_targets(json_file)
    for file in (measure.text, measure.wikitext, measure.lambada):
        if file is not None and not file.is_file():
            raise InputError(f"{file} is not a file")
    if (measure.limit or measure.task_folder) and not measure.tasks:
        raise InputError("--limit and --task-folder are for tasks", hint="name them: --tasks NAME,NAME")
    if measure.task_folder is not None and not measure.task_folder.is_dir():
        raise InputError(f"{measure.task_folder} is not a folder")
    with load_distributed(path, device, tp, nproc) as loaded:
        found = evaluate(loaded, measure)
        checkpoint = loaded.checkpoint
    _print(found, str(checkpoint))
    target = json_file or checkpoint.parent / f"{checkpoint.name}.evaluation.json"
    known = read_json(target, "evaluation") if json_file is None and target.exists() else {}
    write_json(target, {**(known if isinstance(known, dict) else {}), **found})
    print(f"written: {target}")


def evaluate(loaded: TextModel, measure: Measure) -> dict[str, Found]:
    """Return what was found by what it was found on. With several processes, rank 0 calls this alone."""
    found: dict[str, Found] = {}
    if measure.text is not None:
        found[str(measure.text)] = of_text(loaded, read_text(measure.text), measure)
    if measure.wikitext is not None:
        found[f"{measure.wikitext} (WikiText)"] = of_wikitext(loaded, read_text(measure.wikitext), measure)
    if measure.lambada is not None:
        found[f"{measure.lambada} (LAMBADA)"] = of_lambada(loaded, read_passages(measure.lambada), measure)
    if measure.tasks:
        found |= _of_tasks(loaded, measure)
    if measure.data is not None or not found:
        for folder in [measure.data] if measure.data is not None else _trained_on(loaded):
            found[f"{folder} ({measure.split})"] = of_split(loaded, folder, measure)
    return found


def _of_tasks(loaded: TextModel, measure: Measure) -> dict[str, Found]:
    try:
        from shoal.infer.harness import of_tasks
    except ModuleNotFoundError as error:
        raise InputError(f"--tasks needs {error.name}", hint="pip install 'shoal[eval]'") from error
    return of_tasks(loaded, measure)


def of_text(loaded: TextModel, text: str, measure: Measure) -> Found:
    """Return loss, perplexity and bits a byte of one document, its first token given a document's begin."""
    (tokens,) = loaded.tokenizer.encode_batch([text])
    tokens = np.concatenate((np.array([loaded.eod_id], tokens.dtype), tokens))
    return _by_byte(loaded, tokens, measure, len(text.encode()))


def of_wikitext(loaded: TextModel, text: str, measure: Measure) -> Found:
    """Return the same of the text as it was written, and the perplexity by words of the original."""
    words = max(1, len(text.split()))
    found = of_text(loaded, undo_moses(text), measure)
    return {**found, "words": words, "word_perplexity": _finite(perplexity(found["loss_sum"] / words))}


def of_split(loaded: TextModel, folder: Path, measure: Measure) -> Found:
    """Return loss, perplexity and bits a byte of all documents of a split, one after the other."""
    dataset = open_dataset(folder)
    if (dataset.vocab_size, dataset.eod_id) != (loaded.model.shape.vocab_size, loaded.eod_id):
        raise DataError(
            f"{folder} has {dataset.vocab_size} token ids, end of document {dataset.eod_id}; "
            f"{loaded.checkpoint} has {loaded.model.shape.vocab_size} and {loaded.eod_id}",
            hint="evaluate its --text, or prepare it with the model's tokenizer",
        )
    allow = measure.allow_tokenizer_mismatch
    refuse_other_tokenizer(loaded.checkpoint, dataset.tokenizer_path, allow=allow)
    split = dataset.split(measure.split)
    if split is None:
        raise DataError(f"{folder} has no split {measure.split!r}", hint="use train, validation or test")
    split.check_ids(split.tokens, 0)
    tokens = np.concatenate((np.array([loaded.eod_id], split.tokens.dtype), split.tokens))
    documents = np.split(tokens, np.flatnonzero(tokens == loaded.eod_id))
    num_bytes = sum(len(loaded.tokenizer.decode(document[1:].tolist()).encode()) for document in documents)
    return _by_byte(loaded, tokens, measure, num_bytes)


def of_lambada(loaded: TextModel, passages: Sequence[tuple[str, str]], measure: Measure) -> Found:
    """Return how often the whole last word is the likeliest continuation, and its perplexity.

    As lm-evaluation-harness has it: a word's tokens are those of the passage beyond its context's.
    """
    spans = []
    for context, word in passages:
        whole, before = loaded.tokenizer.encode(context + word), len(loaded.tokenizer.encode(context))
        length = min(len(whole), _seq_len(loaded, measure) + 1)
        spans.append(Span(whole[-length:], max(1, before - (len(whole) - length))))
    scores = score_all(loaded, spans, measure.batch_size)
    return {
        "passages": len(spans),
        "accuracy": sum(one.greedy for one in scores) / len(spans),
        "perplexity": _finite(perplexity(sum(one.loss for one in scores) / len(spans))),
    }


def _seq_len(loaded: TextModel, measure: Measure) -> int:
    shape = loaded.model.shape
    if shape.style == "gpt2" and measure.seq_len > shape.max_seq_len:
        raise InputError(
            f"--seq-len {measure.seq_len} is beyond the model's {shape.max_seq_len} learned positions",
            hint=f"use --seq-len {shape.max_seq_len} or less",
        )
    return measure.seq_len or shape.max_seq_len


def _by_byte(loaded: TextModel, tokens: NDArray[np.integer], measure: Measure, num_bytes: int) -> Found:
    seq_len = _seq_len(loaded, measure)
    stride = measure.stride or seq_len
    if stride > seq_len:
        raise InputError(
            f"--stride {stride} is longer than the window of {seq_len} tokens, and would leave targets out",
            hint=f"use --stride {seq_len} or less",
        )
    if len(tokens) < 2:
        raise DataError("there is no token to score")
    loss_sum = math.fsum(
        one.loss for one in score_all(loaded, sliding_spans(tokens, seq_len, stride), measure.batch_size)
    )
    mean = loss_sum / (len(tokens) - 1)
    return {
        "seq_len": seq_len,
        "stride": stride,
        "tokens": len(tokens) - 1,
        "bytes": num_bytes,
        "loss_sum": loss_sum,
        "loss": mean,
        "perplexity": _finite(perplexity(mean)),
        "bits_per_byte": loss_sum / math.log(2) / num_bytes if num_bytes else None,
    }


def _finite(value: float) -> float | None:
    """Return None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def _trained_on(loaded: TextModel) -> list[Path]:
    """Return the datasets that a checkpoint was trained on."""
    ours = (loaded.checkpoint / STATE).is_file()
    entries = read_state(loaded.checkpoint).get("datasets", []) if ours else []
    folders = [Path(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]
    if not folders or not all(folder.is_dir() for folder in folders):
        raise InputError(
            f"nothing to evaluate on: the datasets of {loaded.checkpoint} are not here",
            hint="name a text or a dataset: --text FILE, --data DATASET",
        )
    return folders


def _print(found: dict[str, Found], title: str) -> None:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("on", overflow="fold")
    names = list(dict.fromkeys(name for one in found.values() for name in one if name != "loss_sum"))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for source, one in found.items():
        cells = ["" if (value := one.get(name)) is None else _shown(value) for name in names]
        table.add_row(source, *cells)
    Console(markup=False).print(table)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else json.dumps(round(value, 4))
