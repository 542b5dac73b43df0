"""A run that was stopped goes on as if it had not been."""

import json
import re

import numpy as np
import pytest
import torch

from shoal.checkpoint.manifest import Manifest, file_entry, read_manifest
from shoal.data.dataset import seal
from shoal.runtime.files import hash_file
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from tests.cases import every
from tests.tiny_dataset import random_dataset, with_other_tokenizer, write_dataset
from tests.train.ranks import equal, make_job, run_training, tiny_config

SIX = {"steps": 6}
DROPOUT = {"dropout": 0.1}


@pytest.mark.parametrize("world_size", every(2, [1, 4, 2]))
def test_resume_is_bitwise_equal(pool, data, tmp_path, world_size):
    values = tiny_config(data, train=SIX, model=DROPOUT)
    whole = pool.run(run_training, world_size, tmp_path / "whole", values)
    halted = tiny_config(data, train=SIX, model=DROPOUT, runtime={"stop_after": 3})
    first = pool.run(run_training, world_size, tmp_path / "parts", halted)
    assert not first[0]["done"]
    assert first[0]["steps"] == [1, 2, 3]
    second = pool.run(run_training, world_size, tmp_path / "parts", values)
    equal(whole[0], second[0])


def runs_with_reproducible_kernels(run_dir, values, halted):
    """Train whole and in two parts; an operation without such a kernel would raise."""
    try:
        return train_with_reproducible_kernels(run_dir, values, halted)
    finally:
        torch.use_deterministic_algorithms(False)  # the pool's worker lives on


def train_with_reproducible_kernels(run_dir, values, halted):
    run_training(run_dir / "plain", values | {"train": {**values["train"], "deterministic": False}})
    before = torch.are_deterministic_algorithms_enabled()
    whole = run_training(run_dir / "whole", values)
    run_training(run_dir / "parts", halted)
    asked = torch.are_deterministic_algorithms_enabled()
    return whole, run_training(run_dir / "parts", values), before, asked


def test_train_deterministic_has_every_step_computed_by_reproducible_kernels(pool, data, tmp_path):
    values = tiny_config(data, train=SIX | {"deterministic": True}, model=DROPOUT)
    halted = values | {"runtime": {**values["runtime"], "stop_after": 3}}
    whole, resumed, before, asked = pool.run(runs_with_reproducible_kernels, 1, tmp_path, values, halted)[0]
    assert (before, asked) == (False, True)
    equal(whole, resumed)


@pytest.mark.parametrize(("before", "after"), every(2, [(2, 1), (1, 2), (2, 4)]))
def test_resume_on_another_number_of_processes_sees_the_same_samples(pool, data, tmp_path, before, after):
    values = tiny_config(data, train=SIX, model=DROPOUT)
    whole = pool.run(run_training, before, tmp_path / "whole", values)[0]
    pool.run(
        run_training, before, tmp_path / "parts", values | {"runtime": {**values["runtime"], "stop_after": 3}}
    )
    resumed = pool.run(run_training, after, tmp_path / "parts", values)[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=2e-6)
    np.testing.assert_allclose(resumed["norms"], whole["norms"], rtol=5e-6)


def test_metrics_of_a_lost_attempt_are_dropped(pool, data, tmp_path):
    values = tiny_config(data, train=SIX, checkpoint={"every": 2})
    pool.run(run_training, 1, tmp_path, values | {"runtime": {**values["runtime"], "stop_after": 4}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 99.0, "grad_norm": 1.0}) + '\n{"step": 6, "lo')
    result = pool.run(run_training, 1, tmp_path, values)[0]
    assert result["steps"] == [1, 2, 3, 4, 5, 6]
    assert 99.0 not in result["losses"]


def test_a_finished_run_started_again_trains_nothing(pool, data, tmp_path):
    values = tiny_config(data)
    first = pool.run(run_training, 1, tmp_path, values)[0]
    again = pool.run(run_training, 1, tmp_path, values)[0]
    assert again["done"]
    equal(first, again)


def test_more_steps_train_on_and_the_schedule_follows(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    longer = pool.run(run_training, 1, tmp_path, tiny_config(data, train={"steps": 8}))[0]
    assert longer["steps"] == list(range(1, 9))
    rates = [line["lr"] for line in longer["lines"] if "lr" in line]
    assert rates[7] == pytest.approx(1e-3)
    assert rates[5] > rates[6] > rates[7]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"n_layers": 3}}, "model.n_layers was 2, now 3"),
        ({"train": {"global_batch_size": 8}}, "train.global_batch_size was 16, now 8"),
        ({"train": {"seq_len": 8}}, "train.seq_len was 16, now 8"),
        ({"train": {"seed": 4}}, "train.seed was 3, now 4"),
    ],
)
def test_a_changed_model_or_data_order_is_refused_by_name(pool, data, tmp_path, change, named):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    with pytest.raises(AssertionError, match=named) as caught:
        pool.run(run_training, 1, tmp_path, tiny_config(data, **change))
    other_shape = "model" in change
    assert ("--init" in str(caught.value)) == (not other_shape)
    if not other_shape:  # the hint is one that helps
        checkpoint = tmp_path / "checkpoints/step-00000005"
        pool.run(run_child, 1, tmp_path / "new", tiny_config(data, **change), checkpoint, False)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"n_layers": 3}, "model.n_layers is 2 there, 3 here"),
        (
            {"max_seq_len": 32, "d_ff": 48},
            "model.d_ff is 128 there, 48 here; model.max_seq_len is 16 there",
        ),
    ],
)
def test_init_from_another_shape_is_refused_by_setting_with_those_that_fit(
    pool, data, tmp_path, model, named
):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data))
    with pytest.raises(AssertionError, match=named) as caught:
        pool.run(run_child, 1, tmp_path / "new", tiny_config(data, model=model), tmp_path / "first", False)
    theirs = dict(re.findall(r"model\.(\w+) = (\d+)", str(caught.value).partition("hint: ")[2]))
    fitting = tiny_config(data, model=model | {name: int(value) for name, value in theirs.items()})
    assert pool.run(run_child, 1, tmp_path / "new", fitting, tmp_path / "first", False)[0]["done"]


def test_changed_data_is_refused_with_both_fingerprints(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "run", tiny_config(data))
    other = random_dataset(tmp_path / "other", seed=1)
    with pytest.raises(
        AssertionError, match=r"the data changed since .*: fingerprint \w{32} then, \w{32} now"
    ):
        pool.run(run_training, 1, tmp_path / "run", tiny_config(other))


def test_fewer_steps_than_the_checkpoint_are_refused(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    with pytest.raises(AssertionError, match=r"is at step 5, beyond train.steps = 4"):
        pool.run(run_training, 1, tmp_path, tiny_config(data, train={"steps": 4}))


def test_init_starts_a_new_run_from_weights_alone(pool, data, tmp_path):
    first = pool.run(run_training, 1, tmp_path / "first", tiny_config(data))[0]
    values = tiny_config(
        data, train={"steps": 1}, optimizer={"lr": 1e-12}, schedule={"warmup_steps": 0, "min_lr": 0}
    )
    new = pool.run(run_child, 2, tmp_path / "new", values, tmp_path / "first", False)[0]
    for name, weight in first["weights"].items():
        np.testing.assert_allclose(new["weights"][name], weight, atol=1e-9, err_msg=name)
    assert new["steps"] == [1]
    assert float(new["moments"]["embed.weight"]["step"]) == 1
    state = json.loads((tmp_path / "new/checkpoints/step-00000001/state.json").read_text())
    assert [parent["step"] for parent in state["lineage"]] == [5]


def test_init_optimizer_keeps_the_moments(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data))
    values = tiny_config(data, train={"steps": 1}, schedule={"warmup_steps": 0})
    new = pool.run(run_child, 1, tmp_path / "new", values, tmp_path / "first", True)[0]
    assert float(new["moments"]["embed.weight"]["step"]) == 6


def run_child(run_dir, values, parent, moments):
    return run_training(run_dir, values, init=parent, init_optimizer=moments)


def test_a_strangers_state_is_refused_in_a_sentence(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data))
    checkpoint = tmp_path / "first/checkpoints/step-00000005"
    forge(checkpoint, lambda state: state.pop("lineage"))
    with pytest.raises(
        AssertionError,
        match=r"the state of checkpoint .*step-00000005 has a missing or invalid entry: 'lineage'",
    ):
        pool.run(run_child, 1, tmp_path / "new", tiny_config(data), checkpoint, False)


def forge(checkpoint, change):
    """Rewrite state.json and the manifest so that they verify."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    old = read_manifest(checkpoint)
    files = {**old.files, "state.json": file_entry(checkpoint / "state.json")}
    (checkpoint / "manifest.json").write_text(Manifest(old.step, files, old.world_size).to_json())


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_by_itself(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    for file in (tmp_path / "checkpoints/step-00000005/model").iterdir():
        file.write_bytes(b"rubbish")
    with pytest.raises(AssertionError, match=r"all checkpoints of .* are damaged: bad-step-00000005"):
        pool.run(run_training, 1, tmp_path, tiny_config(data))


def test_weights_of_another_vocabulary_are_not_taken(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data))
    walk = np.arange(20_000) % 250
    splits = {"train": [walk], "validation": [walk[:500]], "test": [walk[:500]]}
    other = write_dataset(tmp_path / "other", splits, vocab_size=300, eod_id=299)
    with pytest.raises(AssertionError, match="was trained with 257 token ids, end of document 256") as caught:
        pool.run(run_child, 1, tmp_path / "new", tiny_config(other), tmp_path / "first", False)
    assert "the data has 300, end of document 299" in str(caught.value)


def test_another_optimiser_is_refused_by_name(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    with pytest.raises(AssertionError, match=r"optimizer\.name was adamw, now sgd"):
        pool.run(run_training, 1, tmp_path, tiny_config(data, optimizer={"name": "sgd"}))


ONE_STEP = {"train": {"steps": 1}, "schedule": {"warmup_steps": 0}}


def test_init_mixing_and_resuming_refuse_another_tokenizer_of_the_same_size(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data, **ONE_STEP), timeout=200)
    other = with_other_tokenizer(random_dataset(tmp_path / "other"))
    refused = r"other/tokenizer.json is another tokenizer than .*/{}, .*digests are \w{{32}} and \w{{32}}"
    values = tiny_config(other, **ONE_STEP)
    with pytest.raises(AssertionError, match=refused.format("step-00000001")):
        pool.run(run_child, 1, tmp_path / "new", values, tmp_path / "first", False, timeout=200)
    mixed = {"datasets": [str(data), str(other)]}
    with pytest.raises(AssertionError, match=refused.format("tokenizer.json")):
        pool.run(run_training, 1, tmp_path / "mixed", tiny_config(data, **ONE_STEP, data=mixed), timeout=200)
    with pytest.raises(AssertionError, match="the data changed since"):
        pool.run(run_training, 1, tmp_path / "first", tiny_config(other, **ONE_STEP), timeout=200)
    allowed = mixed | {"allow_tokenizer_mismatch": True}
    values = tiny_config(other, **ONE_STEP, data=allowed)
    pool.run(run_child, 1, tmp_path / "new", values, tmp_path / "first", False, timeout=200)


def test_the_same_tokenizer_written_otherwise_goes_on(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path / "first", tiny_config(data, **ONE_STEP), timeout=200)
    other = with_other_tokenizer(random_dataset(tmp_path / "other", seed=1))
    spec = json.loads((data / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(spec | {"decoder": None}, indent=3))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["xxh3"] = hash_file(other / "tokenizer.json")
    (other / "manifest.json").write_text(json.dumps(seal(manifest)))
    values = tiny_config(other, **ONE_STEP)
    pool.run(run_child, 1, tmp_path / "new", values, tmp_path / "first", False, timeout=200)


def test_a_flipped_bit_ends_the_run_before_a_checkpoint_of_it(pool, tmp_path):
    data = random_dataset(tmp_path / "flipped")
    content = bytearray((data / "train.bin").read_bytes())
    content[1000] ^= 1  # still an id of the vocabulary
    (data / "train.bin").write_bytes(content)
    values = tiny_config(data, checkpoint={"every": 1})
    with pytest.raises(AssertionError, match=r"train.bin changed since it was prepared"):
        pool.run(run_training, 1, tmp_path / "run", values, timeout=200)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def train_with_a_failing_save(run_dir, values):
    job = make_job(run_dir, values)

    def fail(*arguments):
        job.checkpoints._error = OSError("the disk is gone")
        return 0.0

    job.checkpoints.save = fail
    try:
        train(job)
    except OSError:
        return read_metrics(run_dir / "metrics.jsonl")[-1]["step"]


def test_a_save_that_failed_ends_the_run_at_the_next_step_and_not_at_the_next_save(pool, data, tmp_path):
    values = tiny_config(data, checkpoint={"every": 2})
    assert pool.run(train_with_a_failing_save, 1, tmp_path / "run", values) == [2]
