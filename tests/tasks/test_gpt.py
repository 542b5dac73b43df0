"""Batches that are read while the step before them runs: the same ones, on any number of ranks."""

import threading

import numpy as np
import pytest

from shoal.config.load import validate
from shoal.data.loader import Loader
from shoal.errors import DataError
from shoal.tasks.gpt import dropout_keys
from shoal.tasks.tokens import open_tokens, with_vocabulary
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import VOCAB_SIZE, random_dataset, with_other_tokenizer
from tests.train.ranks import make_job, tiny_config


def batches_and_threads(run_dir, values):
    """Return the batches of some steps in odd order, and the reading threads left after a whole training."""
    before = set(threading.enumerate())
    job = make_job(run_dir, values)
    batches = [job.task.batch(step) for step in (1, 2, 5, 2)]
    for batch in batches:
        assert np.array_equal(batch.data[0], job.task.loader.batch(batch.step).data)
    assert train(job)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    return [batch.samples for batch in batches], [name for name in names if name.startswith("ahead")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_is_read_ahead_is_what_the_step_is_due(pool, data, tmp_path, world_size):
    values = tiny_config(data, train={"global_batch_size": 12, "micro_batch_size": 1})
    answers = pool.run(batches_and_threads, world_size, tmp_path, values)
    for number, step in enumerate((1, 2, 5, 2)):
        samples = np.concatenate([batches[number] for batches, _ in answers])
        assert samples.tolist() == list(range((step - 1) * 12, step * 12))
    assert [threads for _, threads in answers] == [[]] * world_size


def train_with_a_bad_third_step(run_dir, values):
    read = Loader.batch

    def batch(self, step):
        if step == 3:
            raise OSError("the disk is gone")
        return read(self, step)

    Loader.batch = batch
    try:
        train(make_job(run_dir, values))
    finally:
        Loader.batch = read


def test_an_error_of_reading_ends_the_step_that_it_belongs_to(pool, data, tmp_path):
    with pytest.raises(AssertionError, match="the disk is gone") as caught:
        pool.run(train_with_a_bad_third_step, 1, tmp_path, tiny_config(data))
    assert "in batch" in str(caught.value)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_samples_dropout_key_is_a_fixed_function_of_seed_and_sample():
    """The multiplicative hash of SplitMix64's first round, in integers of any size."""

    def expected(seed, sample):
        mixed = (sample * 0x9E3779B97F4A7C15 + seed) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        return mixed - 2**64 * (mixed >= 2**63)

    samples = [0, 1, 2, 999, 2**40 + 1]
    for seed in (0, 7, 2**31):
        assert dropout_keys(seed, np.array(samples)).tolist() == [expected(seed, n) for n in samples]


def test_weights_trained_with_another_tokenizer_are_refused(data, tmp_path):
    opened = open_tokens(with_vocabulary(validate(tiny_config(data), "test"), VOCAB_SIZE))
    state = {"vocab_size": VOCAB_SIZE, "eod_id": opened.eod_id}
    opened.refuse_other(state, data)
    for changed in ({"vocab_size": 300}, {"eod_id": 7}):
        with pytest.raises(DataError, match="was trained with"):
            opened.refuse_other(state | changed, data)
    other = with_other_tokenizer(random_dataset(tmp_path / "other"))
    with pytest.raises(DataError, match=r"is another tokenizer than .*other"):
        opened.refuse_other(state, other)
