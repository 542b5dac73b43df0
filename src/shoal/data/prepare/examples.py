"""`shoal prepare` for labelled examples: .npz archives, MNIST's IDX files, or images made up for timing."""

from __future__ import annotations

import gzip
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from shoal.data.dataset import EXAMPLES_FORMAT, MANIFEST, SPLITS, seal
from shoal.data.examples import FORMAT_VERSION, INPUT_DTYPES, ExampleSet, Pair, open_examples
from shoal.data.prepare.images import (
    DIGITS,
    DIGITS_32,
    MAX_BYTES,
    RANDOM,
    cifar_files,
    is_named,
    read_cifar,
    read_named,
)
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.splits import SplitPlan, allocate
from shoal.errors import DataError, InputError, counted
from shoal.runtime.files import atomic_write, hash_file, read_json, write_json

_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_IDX_BYTES = b"\x00\x00\x08"  # what an IDX file of bytes begins with, before the number of its dims
_DAMAGED = (zipfile.BadZipFile, zlib.error)
_MAX_PACKED, _SMALL = 64, 64 << 20  # how many times its packed size an array may take, above so many bytes
_MAX_CLASSES = 1 << 16
_ROWS = 4096  # at a time
_FOR_TEXT = (
    "tokenizer",
    "vocab_size",
    "text_key",
    "delim",
    "separator",
    "max_rejected_share",
    "workers",
    "ext",
    "runner",
    "web",
    "stages",
    "urls",
    "shuffle",
)
_WANTED = "arrays x and y, or x_train, y_train and perhaps x_test, y_test"
Found = tuple[bool, NDArray[Any], NDArray[Any]]  # whether they are test examples, inputs, labels


def holds_examples(options: PrepareOptions) -> bool:
    """Say whether an input is one of those that this module reads."""
    paths = [Path(name) for name in options.inputs]
    return any(map(is_named, options.inputs)) or any(
        path.suffix == ".npz" or _idx_files(path) or cifar_files(path) for path in paths
    )


def prepare_examples(options: PrepareOptions, console: Console) -> ExampleSet:
    """Make the dataset folder `options.output`, or find it made; the manifest comes last."""
    _refuse_text_options(options)
    splits = _split(options)
    dtype = np.result_type(*(inputs for inputs, _ in splits.values())).name
    manifest: dict[str, Any] = {
        "format": EXAMPLES_FORMAT,
        "version": FORMAT_VERSION,
        "dtype": dtype,
        "shape": list(splits["train"][0].shape[1:]),
        "num_classes": int(max(labels.max() for _, labels in splits.values())) + 1,
        **_moments(splits["train"][0]),
        "inputs": {
            name: getattr(options, name)
            for name in ("inputs", "validation", "test", "split", "seed", "limit")
        },
        "splits": {},
    }
    made = options.output / MANIFEST
    if made.exists():
        _refuse_other(read_json(made, "dataset manifest"), manifest, options.output)
    for name, (inputs, labels) in splits.items():
        facts: dict[str, Any] = {"examples": len(labels)}
        manifest["splits"][name] = facts
        for kind, array in (("inputs", inputs.astype(dtype, copy=False)), ("labels", labels)):
            path = options.output / f"{name}.{kind}.npy"
            with atomic_write(path) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
            facts[f"{kind}_xxh3"] = hash_file(path)
    write_json(made, seal(manifest))
    counts = ", ".join(f"{name} {len(labels):,}" for name, (_, labels) in splits.items())
    console.print(f"{options.output}: {counts} examples of {manifest['num_classes']} classes")
    return open_examples(options.output)


def _refuse_text_options(options: PrepareOptions) -> None:
    defaults = {field.name: field.default for field in fields(PrepareOptions)}
    for name in _FOR_TEXT:
        if (value := getattr(options, name)) != defaults[name]:
            raise InputError(
                f"--{name.replace('_', '-')} {value} is for text, and these are labelled examples",
                hint="leave it out",
            )


def _refuse_other(old: Any, new: dict[str, Any], output: Path) -> None:
    """Refuse to write over a folder that was made otherwise; the same again is no harm."""
    now = json.loads(json.dumps({name: value for name, value in new.items() if name != "splits"}))
    if not isinstance(old, dict) or {name: old.get(name) for name in now} != now:
        raise InputError(
            f"{output} already holds a dataset made with other options",
            hint="choose another --output, or delete that folder first",
        )


def _split(options: PrepareOptions) -> dict[str, Pair]:
    """Return the checked arrays of each split that is not empty."""
    roles = {"validation": options.validation, "test": options.test}
    found = {name: [pair for source in roles[name] for pair in _read(source, options)] for name in roles}
    main = [pair for source in options.inputs for pair in _read(source, options)]
    held_out = any(is_test for is_test, *_ in main) and not all(is_test for is_test, *_ in main)
    if held_out:
        found["test"] += [pair for pair in main if pair[0]]
        main = [pair for pair in main if not pair[0]]
    inputs, labels = _join(main)
    inputs, labels = inputs[: options.limit], labels[: options.limit]
    train, validation, test = options.shares
    kept = (train, validation, 0.0) if held_out else (train, validation, test)
    shares = cast(tuple[float, float, float], tuple(share / sum(kept) for share in kept))
    plan = SplitPlan("documents", allocate(len(labels), shares), options.seed)
    split_of = plan.of_documents(0, len(labels))
    splits = {name: (inputs[split_of == n], labels[split_of == n]) for n, name in enumerate(SPLITS)}
    splits |= {name: _join(pairs) for name, pairs in found.items() if pairs}
    if not len(splits["train"][1]):
        raise DataError(
            f"{counted(len(labels), 'example')}: none is left to train on", hint="give more, or other --split"
        )
    shapes = {str(list(array.shape[1:])) for array, _ in splits.values()}
    if len(shapes) > 1:
        raise DataError(f"inputs have different shapes: {', '.join(sorted(shapes))}")
    return {name: pair for name, pair in splits.items() if len(pair[1])}


def _join(found: list[Found]) -> Pair:
    if len({inputs.shape[1:] for _, inputs, _ in found}) > 1:
        shapes = ", ".join(str(list(inputs.shape[1:])) for _, inputs, _ in found)
        raise DataError(f"inputs have different shapes: {shapes}")
    return np.concatenate([inputs for _, inputs, _ in found]), np.concatenate([y for *_, y in found])


def _moments(inputs: NDArray[Any]) -> dict[str, float]:
    """Return mean and deviation of all values; a DataError where nothing can be standardised by them."""
    total, squares = 0.0, 0.0
    for first in range(0, len(inputs), _ROWS):
        rows = inputs[first : first + _ROWS].astype(np.float64)
        total, squares = total + float(rows.sum()), squares + float(np.square(rows).sum())
    mean = total / inputs.size
    variance = squares / inputs.size - mean**2
    if not (math.isfinite(variance) and variance > 0):
        raise DataError("the training inputs are all alike, or not all of them are numbers")
    return {"mean": mean, "std": math.sqrt(variance)}


def _read(source: str, options: PrepareOptions) -> Iterator[Found]:
    """Yield the examples of one input, checked."""
    path = Path(source)
    if is_named(source):
        found: list[Found] = [(False, *read_named(source, options.limit or 10_000, options.seed))]
    elif path.suffix == ".npz":
        found = _read_npz(path)
    elif batches := cifar_files(path):
        found = [(file.name.startswith("test"), *read_cifar(file)) for file in batches]
    elif files := _idx_files(path):
        found = [(f.name.startswith("t10k"), _read_idx(f), _read_idx(_labels_of(f))) for f in files]
    else:
        raise InputError(
            f"{source} holds no labelled examples",
            hint=f"give .npz files, a folder of IDX files (*{_IMAGES}) or of CIFAR-10's binary version, "
            f"{DIGITS}, {DIGITS_32} or {RANDOM}",
        )
    for is_test, inputs, labels in found:
        yield is_test, *_checked(source, inputs, labels)


def _checked(source: str, inputs: NDArray[Any], labels: NDArray[Any]) -> Pair:
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(np.float32, copy=False)
    if inputs.dtype.name not in INPUT_DTYPES or inputs.ndim < 2 or not inputs.size:
        raise DataError(
            f"the inputs of {source} are {inputs.dtype.name} {list(inputs.shape)}",
            hint="give bytes or floating-point numbers, [examples, ...]",
        )
    if labels.dtype.kind not in "iu" or labels.shape != inputs.shape[:1]:
        raise DataError(
            f"the labels of {source} are {labels.dtype.name} {list(labels.shape)} for {len(inputs)} inputs",
            hint="give one whole number for each input",
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < _MAX_CLASSES:
        raise DataError(
            f"the labels of {source} go from {labels.min()} to {labels.max()}",
            hint=f"number the classes from 0, at most {_MAX_CLASSES - 1}",
        )
    return inputs, labels.astype(np.int64)


def _read_npz(path: Path) -> list[Found]:
    pairs = [("x", "y", False), ("x_train", "y_train", False), ("x_test", "y_test", True)]
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _refuse_large(path, member.filename, member.file_size, member.compress_size)
        with np.load(path, allow_pickle=False) as arrays:
            known = {name: arrays[name] for pair in pairs for name in pair[:2] if name in arrays.files}
            names = arrays.files
    except DataError:
        raise
    except Exception as error:  # numpy parses headers as Python does, with errors of all kinds
        raise DataError(f"{path} cannot be read: {error}", hint=f"give an .npz with {_WANTED}") from error
    found = [(test, known[x], known[y]) for x, y, test in pairs if {x, y} <= known.keys()]
    if not found:
        raise DataError(f"{path} holds {', '.join(names) or 'nothing'}", hint=f"it needs {_WANTED}")
    return found


def _idx_files(path: Path) -> list[Path]:
    """Return IDX files of images: `path` itself, or those in the folder."""
    files = path.glob(f"*{_IMAGES}*") if path.is_dir() else [path]
    named = {file.name.removesuffix(".gz"): file for file in sorted(files) if _IMAGES in file.name}
    return [named[name] for name in sorted(named)]  # one of a file that is there packed, too


def _labels_of(images: Path) -> Path:
    for suffix in (images.suffix, "", ".gz"):
        stem = images.name.removesuffix(".gz").replace(_IMAGES, _LABELS)
        path = images.with_name(stem + (suffix if suffix == ".gz" else ""))
        if path.exists():
            return path
    raise DataError(f"{images} has no labels beside it", hint=f"put {stem} there")


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, packed or not (Y. LeCun's description of MNIST's files)."""
    opened = cast(Callable[..., BinaryIO], gzip.open if path.suffix == ".gz" else open)
    try:
        with opened(path, "rb") as file:
            head = file.read(4)
            dims = head[3] if head[:3] == _IDX_BYTES and len(head) == 4 else 0
            shape = [int.from_bytes(file.read(4), "big") for _ in range(dims)]
            size = math.prod(shape)
            _refuse_large(path, "its array", size, path.stat().st_size)
            data = file.read(size + 1)
    except (OSError, EOFError, ValueError, *_DAMAGED) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not shape or len(data) != size:
        raise DataError(f"{path} is no IDX file of bytes, or it is cut short", hint="copy it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _refuse_large(path: Path, what: str, size: int, packed: int) -> None:
    most = min(MAX_BYTES, max(_SMALL, _MAX_PACKED * packed))
    if size > most:
        raise DataError(f"{path}: {what} takes {size:,} bytes, and {most:,} are allowed")
