"""Labelled examples: what is read, how it is split and kept, and what is refused."""

import errno
import gzip
import importlib.util
import json
from io import BytesIO
from unittest import mock
from zipfile import ZipFile

import numpy as np
import pytest
from rich.console import Console

from shoal.data.dataset import open_dataset
from shoal.data.examples import Examples, open_examples
from shoal.data.loader import Loader
from shoal.data.prepare import examples
from shoal.data.prepare.examples import holds_examples, prepare_examples
from shoal.data.prepare.images import DIGITS, DIGITS_32, RANDOM
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, InputError, ShoalError, UnreadableError
from tests.tiny_dataset import random_dataset


def prepare(output, *inputs, **options):
    return prepare_examples(PrepareOptions(tuple(map(str, inputs)), output, **options), Console(quiet=True))


def idx(array):
    head = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "digits.npz"
    x, y = np.arange(200, dtype=np.uint8).reshape(50, 2, 2), np.arange(50) % 3
    np.savez(path, x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    return path


def test_an_archive_becomes_three_splits_that_hold_each_example_once(archive, tmp_path):
    made = prepare(tmp_path / "data", archive, split="4,1")
    sizes = {name: len(labels) for name, (_, labels) in made.splits.items()}
    assert sizes == {"train": 40, "validation": 10, "test": 5}
    assert (made.shape, made.num_classes) == ((2, 2), 3)
    both = np.concatenate([made.splits[name][0] for name in ("train", "validation")])
    assert sorted(both[:, 0, 0]) == list(range(0, 200, 4))
    for inputs, labels in made.splits.values():
        assert (inputs[:, 0, 0] // 4 % 3 == labels).all()
    assert made.mean == pytest.approx(made.splits["train"][0].mean())
    assert made.std == pytest.approx(made.splits["train"][0].std())


@pytest.mark.parametrize("packed", [(True,), (False,), (True, False)])
def test_idx_files_are_read_packed_or_not_and_once(tmp_path, packed):
    images, labels = np.arange(24).reshape(6, 2, 2), np.arange(6)
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        for pack in packed:
            data = gzip.compress(idx(array)) if pack else idx(array)
            (tmp_path / (name + ".gz" * pack)).write_bytes(data)
    made = prepare(tmp_path / "data", tmp_path, split="1")
    assert made.splits["train"][0].tolist() == images.tolist()
    assert made.splits["train"][1].tolist() == labels.tolist()


def test_made_up_images_are_the_same_for_a_seed_alone(tmp_path):
    prints = [prepare(tmp_path / str(n), RANDOM, limit=60, seed=n // 2).fingerprint for n in range(4)]
    assert prints[0] == prints[1] != prints[2] == prints[3]


def test_the_fingerprint_follows_inputs_and_labels_of_each_split(tmp_path):
    """With the same sizes, classes, mean and deviation."""
    whole = {"x_train": np.arange(40, dtype=np.uint8).reshape(10, 2, 2), "y_train": np.arange(10) % 3}
    whole |= {"x_test": whole["x_train"][:5], "y_test": whole["y_train"][:5]}
    prints = set()
    for changed in ("", *whole):
        archive = tmp_path / f"{changed}-turned.npz"
        np.savez(archive, **{name: array[:: -1 if name == changed else 1] for name, array in whole.items()})
        made = prepare(tmp_path / f"data-{changed}", archive, split="1")
        assert (made.num_classes, made.mean) == (3, 19.5)
        prints.add(made.fingerprint)
    assert len(prints) == 5


def test_text_and_examples_are_told_apart(archive, tmp_path):
    assert holds_examples(PrepareOptions((str(archive),), tmp_path))
    assert not holds_examples(PrepareOptions(("stdlib", str(tmp_path)), tmp_path))


def test_every_example_comes_once_an_epoch_on_any_number_of_ranks(archive, tmp_path):
    made = prepare(tmp_path / "data", archive, split="1")
    source = Examples([made.splits["train"], made.splits["test"]])  # 50 and 5

    def step(number, world_size):
        ranks = [
            Loader(source, weights=(), global_batch_size=8, seed=3, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        shares = [loader.batch(number) for loader in ranks]
        assert {share.global_targets for share in shares} == {8}
        return [np.concatenate(parts).tolist() for parts in zip(*(s.data for s in shares), strict=True)]

    for number in (1, 7, 20):
        assert step(number, 1) == step(number, 2) == step(number, 4)
    seen = [image[0][0] for number in range(1, 56) for image in step(number, 1)[0]]
    assert {seen.count(first) for first in seen} == {8, 16}  # the second set repeats the first's five


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([[{}]]), "y": np.array([0])}, "Object arrays cannot be loaded"),
        ({"images": np.zeros((2, 2))}, "holds images"),
        ({"x": np.zeros((2, 2), np.int32), "y": np.zeros(2, int)}, r"inputs of .* are int32 \[2, 2\]"),
        ({"x": np.ones((2, 2)), "y": np.zeros(3, int)}, r"labels of .* are int64 \[3\] for 2 inputs"),
        ({"x": np.ones((2, 2)), "y": np.array([0, -1])}, "go from -1 to 0"),
        ({"x": np.ones((2, 2)), "y": np.array([0.5, 1])}, "labels of .* are float64"),
        ({"x": np.ones((2, 2)), "y": np.array([0, 1])}, "all alike, or not all of them are numbers"),
        ({"x": np.array([[1.0, np.nan]] * 2), "y": np.array([0, 1])}, "not all of them are numbers"),
    ],
)
def test_an_archive_that_cannot_be_used_is_refused_in_words(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "data", tmp_path / "bad.npz", split="1")
    assert not (tmp_path / "data").exists()


def test_a_damaged_archive_is_named(archive, tmp_path):
    arrays = dict(np.load(archive))
    np.savez_compressed(archive, **arrays)
    data = bytearray(archive.read_bytes())
    data[60:90] = bytes(30)
    archive.write_bytes(data)
    with pytest.raises(DataError, match=r"digits\.npz cannot be read"):
        prepare(tmp_path / "data", archive, split="1")


def test_an_archive_is_measured_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "MAX_BYTES", 1000)
    held = BytesIO()
    np.save(held, np.zeros((1000, 2)))
    with ZipFile(tmp_path / "large.npz", "w") as archive:
        archive.writestr("x.npy", held.getvalue())
    with pytest.raises(DataError, match=r"x.npy takes 16,128 bytes, and 1,000 are allowed"):
        prepare(tmp_path / "data", tmp_path / "large.npz")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx(np.zeros((2, 2, 2)))[:-1], idx(np.zeros(2)), "images.* cut short"),
        (b"GIF89a", idx(np.zeros(2)), "images.* is no IDX file"),
        (idx(np.zeros((2, 2, 2))), None, "has no labels beside it"),
        (b"\0\0\x08\x03" + b"\xff" * 12, idx(np.zeros(2)), "bytes, and .* are allowed"),
    ],
)
def test_bad_idx_files_are_named(tmp_path, images, labels, message):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    if labels is not None:
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "data", tmp_path)


def test_a_folder_made_otherwise_is_not_written_over(archive, tmp_path):
    made = prepare(tmp_path / "data", archive)
    assert prepare(tmp_path / "data", archive).fingerprint == made.fingerprint
    with pytest.raises(InputError, match="already holds a dataset made with other options"):
        prepare(tmp_path / "data", archive, seed=5)
    with pytest.raises(InputError, match="--vocab-size 300 is for text"):
        prepare(tmp_path / "other", archive, vocab_size=300)


def test_damage_and_the_wrong_kind_of_data_are_found_on_opening(archive, tmp_path):
    path = tmp_path / "data"
    prepare(path, archive)
    with pytest.raises(DataError, match="holds labelled examples, and this run takes tokens"):
        open_dataset(path)
    with pytest.raises(DataError, match="holds tokens, and this run takes labelled examples"):
        open_examples(random_dataset(tmp_path / "text"))
    np.save(path / "test.labels.npy", np.zeros(4, np.int64))
    with pytest.raises(DataError, match=r"test.labels.npy holds int64 \[4\], the manifest says int64 \[5\]"):
        open_examples(path)
    np.save(path / "test.labels.npy", np.array([0, 1, 99, 1, 0]))
    with pytest.raises(
        DataError, match=r"test.labels.npy holds class 99 at position 2; there are \d+: damag"
    ):
        open_examples(path)
    with (path / "test.labels.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"test.labels.npy has 172 bytes, its header says 168: damaged"):
        open_examples(path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"std": 2.5}))
    with pytest.raises(DataError, match="its digest does not fit"):
        open_examples(path)
    del manifest["digest"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"std": 0}))
    with pytest.raises(ShoalError, match="prepare it again"):
        open_examples(path)


def test_a_file_that_cannot_be_read_is_not_called_damaged(archive, tmp_path, monkeypatch):
    path = tmp_path / "data"
    prepare(path, archive)
    with monkeypatch.context() as patch:
        failing = OSError(errno.EIO, "EIO", str(path / "train.inputs.npy"))
        patch.setattr(np, "load", mock.Mock(side_effect=failing))
        with pytest.raises(UnreadableError, match=r"train.inputs.npy cannot be read: .*EIO"):
            open_examples(path)
    (path / "train.inputs.npy").unlink()
    with pytest.raises(DataError, match="prepare it again"):
        open_examples(path)


def test_random_images_have_the_shape_and_classes_asked_for_and_depend_on_the_seed(tmp_path):
    one, same, other = (
        prepare(tmp_path / str(number), f"{RANDOM}:3x6x5:4", limit=60, seed=seed)
        for number, seed in enumerate((1, 1, 2))
    )
    assert (one.shape, one.num_classes) == ((3, 6, 5), 4)
    assert np.array_equal(one.split("train")[0], same.split("train")[0])
    assert not np.array_equal(one.split("train")[0], other.split("train")[0])
    images, labels = one.split("train")
    means = [images[labels == label].mean(axis=0) for label in range(4)]
    assert min(np.abs(a - b).mean() for a in means for b in means if a is not b) > 20  # classes differ


@pytest.mark.parametrize("name", ["random-images:3x0x5:4", "random-images:3x5", "random-images:3x4x5x6:2"])
def test_a_shape_that_is_none_is_rejected(tmp_path, name):
    with pytest.raises(InputError, match="is not a shape and a number of classes"):
        prepare(tmp_path / "data", name)


def test_random_images_that_would_fill_the_memory_are_rejected(tmp_path):
    with pytest.raises(InputError, match="999,999 images of random-images:3x224x224:10 take"):
        prepare(tmp_path / "data", "random-images:3x224x224:10", limit=999_999)


def test_cifar_batches_are_read_channels_first_with_a_test_split(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "cifar"
    folder.mkdir()
    for name, count in (("data_batch_1", 20), ("data_batch_2", 20), ("test_batch", 6)):
        records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(count) % 10
        records[:, 1] = records[:, 0]  # the first red pixel tells the class
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    made = prepare(tmp_path / "data", folder, split="3,1")
    assert {name: len(labels) for name, (_, labels) in made.splits.items()} == {
        "train": 30,
        "validation": 10,
        "test": 6,
    }
    assert made.shape == (3, 32, 32)
    for inputs, labels in made.splits.values():
        assert (inputs[:, 0, 0, 0] == labels).all()
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" + bytes(3072))
    with pytest.raises(DataError, match="has a label of 11"):
        prepare(tmp_path / "again", folder)
    (folder / "data_batch_2.bin").write_bytes(bytes(3000))
    with pytest.raises(DataError, match="does not hold whole records"):
        prepare(tmp_path / "again", folder)


def test_the_digits_of_scikit_learn_are_a_real_set_in_two_shapes(tmp_path, monkeypatch):
    small, large = (prepare(tmp_path / name, name, split="8,1,1") for name in (DIGITS, DIGITS_32))
    assert (small.shape, large.shape, small.num_classes) == ((28, 28), (3, 32, 32), 10)
    assert sum(len(labels) for _, labels in small.splits.values()) == 1797
    images = [made.split("train")[0] for made in (small, large)]
    assert [array.max() for array in images] == [255, 255]
    assert np.array_equal(images[0][:, 14, 14], images[1][:, 2, 16, 16])  # the same pixel of 8 x 8
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="comes with scikit-learn, which is not installed"):
        prepare(tmp_path / "none", DIGITS)
