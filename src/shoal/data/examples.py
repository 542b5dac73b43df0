"""A dataset folder of labelled examples: for each split the inputs and the labels as .npy files.

The manifest holds what they must be, and mean and deviation of the training inputs, by which inputs are
standardised when they are used.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.dataset import EXAMPLES_FORMAT, SPLITS, read_manifest
from shoal.data.loader import starts
from shoal.errors import DataError
from shoal.runtime.files import read_error

FORMAT_VERSION = 1
INPUT_DTYPES = ("uint8", "float32")
_REMAKE = "prepare it again with `shoal prepare`, or copy it again from where it came"
Pair = tuple[NDArray[Any], NDArray[np.int64]]  # inputs [examples, ...], labels [examples]


@dataclass(frozen=True)
class ExampleSet:
    """An opened folder; `fingerprint` changes with everything that would change a batch."""

    path: Path
    fingerprint: str
    shape: tuple[int, ...]  # of one input
    num_classes: int
    mean: float
    std: float
    splits: dict[str, Pair]  # memory-mapped
    manifest: dict[str, Any]
    digests: dict[Path, str]  # of all files, as they were written

    def split(self, name: str) -> Pair:
        """Return a split, empty where the folder was prepared without it."""
        empty = np.empty((0, *self.shape), np.uint8), np.empty(0, np.int64)
        return self.splits.get(name, empty)


class Examples:
    """The examples of one split of several sets, in one index space."""

    targets = 1

    def __init__(self, splits: Sequence[Pair]) -> None:
        self._splits = splits
        self.counts: NDArray[np.int64] = np.array([len(labels) for _, labels in splits], dtype=np.int64)
        self._starts = starts(self.counts)

    def read(self, index: NDArray[np.int64]) -> Pair:
        """Read examples by index."""
        owner = np.searchsorted(self._starts, index, side="right") - 1
        inputs = np.empty((len(index), *self._splits[0][0].shape[1:]), self._splits[0][0].dtype)
        labels = np.empty(len(index), np.int64)
        for number in np.unique(owner):
            here = owner == number
            place = index[here] - self._starts[number]
            inputs[here], labels[here] = (array[place] for array in self._splits[number])
        return inputs, labels

    def refuse_empty(self, *, each: bool) -> None:
        """Raise a DataError where there is no example, or with `each` where a set has none."""
        if not self.counts.sum() or (each and not self.counts.all()):
            number = int(np.argmin(self.counts)) + 1
            raise DataError(
                f"dataset {number} of {len(self.counts)} holds no example to train on", hint="leave it out"
            )


def fingerprint(manifest: dict[str, Any]) -> str:
    """Hash what decides a batch: the arrays, how they are standardised, the number of classes; not paths."""
    parts = [manifest["num_classes"], manifest["mean"], manifest["std"]]
    for name in SPLITS:
        if name in manifest["splits"]:
            facts = manifest["splits"][name]
            parts += [name, facts["inputs_xxh3"], facts["labels_xxh3"]]
    return xxhash.xxh3_128("\n".join(map(repr, parts)).encode()).hexdigest()


def open_examples(path: Path) -> ExampleSet:
    """Open a folder of examples, checking sizes, shapes, formats and labels against its manifest."""
    manifest = read_manifest(path, EXAMPLES_FORMAT, FORMAT_VERSION)
    try:
        shape = tuple(int(size) for size in manifest["shape"])
        found = ExampleSet(
            path,
            fingerprint(manifest),
            shape,
            int(manifest["num_classes"]),
            float(manifest["mean"]),
            float(manifest["std"]),
            {name: _open_split(path, name, manifest) for name in SPLITS if name in manifest["splits"]},
            manifest,
            {
                path / f"{name}.{kind}.npy": str(facts[f"{kind}_xxh3"])
                for name, facts in manifest["splits"].items()
                for kind in ("inputs", "labels")
            },
        )
        if manifest["dtype"] not in INPUT_DTYPES or found.num_classes < 1 or not found.std > 0:
            raise ValueError("dtype, num_classes or std")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the manifest of dataset {path} has a missing or invalid entry: {error}", hint=_REMAKE
        ) from error
    return found


def _open_split(path: Path, name: str, manifest: dict[str, Any]) -> Pair:
    count = int(manifest["splits"][name]["examples"])
    wanted = {
        "inputs": (manifest["dtype"], (count, *manifest["shape"])),
        "labels": ("int64", (count,)),
    }
    arrays = []
    for kind, (dtype, shape) in wanted.items():
        file = path / f"{name}.{kind}.npy"
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python does, with errors of all kinds
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise read_error(error, file) from error
            raise DataError(f"{file} cannot be read: {error}", hint=_REMAKE) from error
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise DataError(
                f"{file} holds {array.dtype.name} {list(array.shape)}, the manifest says {dtype} "
                f"{list(shape)}: damaged",
                hint=_REMAKE,
            )
        if (size := file.stat().st_size) != array.offset + array.nbytes:
            held = array.offset + array.nbytes
            raise DataError(f"{file} has {size:,} bytes, its header says {held:,}: damaged", hint=_REMAKE)
        arrays.append(array)
    inputs, labels = arrays
    classes = int(manifest["num_classes"])
    if len(strange := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise DataError(
            f"{file} holds class {labels[strange[0]]} at position {strange[0]:,}; there are {classes}: "
            "damaged",
            hint=_REMAKE,
        )
    return inputs, labels
