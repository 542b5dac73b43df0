"""Labelled images that are made, that come with a library, or that have a file format of their own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, InputError
from shoal.runtime.files import reading

RANDOM = "random-images"  # also with a shape and a number of classes: random-images:3x32x32:10
DIGITS, DIGITS_32 = "sklearn-digits", "sklearn-digits-32"
MAX_BYTES = 1 << 34  # of one array
_CIFAR_SHAPE, _CIFAR_CLASSES = (3, 32, 32), 10  # of CIFAR-10's binary version
_ROWS = 4096  # at a time
Images = tuple[NDArray[Any], NDArray[Any]]  # [images, ...], labels [images]


def is_named(source: str) -> bool:
    """Say whether an input is one of the names that this module knows."""
    return source.partition(":")[0] == RANDOM or (source in (DIGITS, DIGITS_32) and not Path(source).exists())


def read_named(source: str, count: int, seed: int) -> Images:
    """Return the images of a name; `count` and `seed` are for random ones.

    Raises:
        InputError: The shape after the name is none, or scikit-learn is not installed.
    """
    return _digits(source) if source in (DIGITS, DIGITS_32) else _random_images(source, count, seed)


def cifar_files(path: Path) -> list[Path]:
    """Return the files of CIFAR-10's binary version in a folder, training first."""
    return (
        sorted(path.glob("data_batch_*.bin")) + sorted(path.glob("test_batch.bin")) if path.is_dir() else []
    )


def read_cifar(path: Path) -> Images:
    """Read records of a label and 3 x 32 x 32 bytes (A. Krizhevsky's description of CIFAR-10's files)."""
    size = 1 + int(np.prod(_CIFAR_SHAPE))
    with reading(path):
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} is larger than {MAX_BYTES:,} bytes")
        data = path.read_bytes()
    if not data or len(data) % size:
        raise DataError(f"{path} does not hold whole records of {size} bytes", hint="copy it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= _CIFAR_CLASSES:
        raise DataError(f"{path} has a label of {labels.max()}, above 9", hint="copy it again")
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE), labels


def _random_images(source: str, count: int, seed: int) -> Images:
    """Make images of bytes: each class has a picture of its own, under noise."""
    shape, classes = _parse_random(source)
    for what, number in (("images", count), ("classes", classes)):
        if (size := number * int(np.prod(shape))) > MAX_BYTES:
            raise InputError(
                f"{number:,} {what} of {source} take {size:,} bytes", hint="use a smaller --limit"
            )
    rng = np.random.default_rng(seed)
    pictures = np.stack([rng.integers(0, 256, shape).astype(np.uint8) for _ in range(classes)])
    labels = rng.integers(0, classes, count)
    images = np.empty((count, *shape), np.uint8)
    rows = max(1, min(_ROWS, _ROWS * 784 // int(np.prod(shape))))
    for first in range(0, count, rows):
        of = pictures[labels[first : first + rows]]
        images[first : first + rows] = (of + rng.integers(0, 256, of.shape)) // 2
    return images, labels


def _parse_random(source: str) -> tuple[tuple[int, ...], int]:
    if source == RANDOM:
        return (28, 28), 10
    found = re.fullmatch(rf"{RANDOM}:(\d{{1,6}}(?:x\d{{1,6}}){{0,2}}):(\d{{1,5}})", source)
    shape = tuple(int(size) for size in found[1].split("x")) if found else ()
    if not found or not all(shape) or int(found[2]) < 2:
        raise InputError(
            f"{source} is not a shape and a number of classes",
            hint=f"write {RANDOM}:3x32x32:10 (channels x height x width, classes) or {RANDOM}:784:10",
        )
    return shape, int(found[2])


def _digits(source: str) -> Images:
    """Return scikit-learn's 1,797 handwritten digits of 8 x 8, enlarged to 28 x 28, or to 3 x 32 x 32."""
    if importlib.util.find_spec("sklearn") is None:
        raise InputError(
            f"{source} comes with scikit-learn, which is not installed", hint="pip install scikit-learn"
        )
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    if source == DIGITS_32:
        large = images.repeat(4, axis=1).repeat(4, axis=2)
        return np.stack([large] * 3, axis=1), labels.astype(np.int64)
    rows = np.arange(28) * 8 // 28  # the nearest pixel
    return images[:, rows][:, :, rows], labels.astype(np.int64)
