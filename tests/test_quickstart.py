"""The figures that the demonstration prints; `make proof` runs the whole of it."""

import math
import zlib

import numpy as np
import pytest
import torch

from shoal.data.dataset import open_dataset
from shoal.errors import InputError
from shoal.infer.load import load_text_model
from shoal.quickstart import bits_per_byte, quickstart, weights_digest
from tests.tiny_dataset import write_dataset
from tests.train.ranks import run_training, tiny_config

LETTERS = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, dtype=np.uint8)


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    splits = {"train": [LETTERS], "validation": [LETTERS[:500]], "test": [LETTERS[:1000]]}
    data = write_dataset(folder / "data", splits)
    pool.run(run_training, 1, folder / "run", tiny_config(data))
    return load_text_model(folder / "run", torch.device("cpu")), data


def test_bits_per_byte_are_those_of_the_same_text(trained):
    model, data = trained
    found = bits_per_byte(model, data)
    tokens = torch.from_numpy(open_dataset(data).split("test").tokens.astype(np.int64))
    windows = (len(tokens) - 1) // 16
    text = bytes(tokens[1 : 1 + 16 * windows].tolist())
    assert found.num_bytes == len(text)
    assert found.zlib == pytest.approx(8 * len(zlib.compress(text, 9)) / len(text))
    inputs = tokens[: 16 * windows].view(windows, 16)
    targets = tokens[1 : 1 + 16 * windows].view(windows, 16)
    with torch.no_grad():
        logits = model.model(inputs).double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert found.model == pytest.approx(float(nats) / math.log(2) / len(text), rel=1e-5)


def test_the_digest_sees_a_single_bit(trained):
    model, _ = trained
    before = weights_digest(model.model)
    assert weights_digest(model.model) == before
    weight = model.model.norm.bias
    with torch.no_grad():
        weight.view(torch.int32)[0] ^= 1
    assert weights_digest(model.model) != before


def test_a_folder_that_is_no_run_of_ours_is_left_alone(tmp_path):
    precious = tmp_path / "runs/killed/precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(InputError, match="is not a run of Shoal's"):
        quickstart(tmp_path)
    assert precious.read_text() == "mine"
