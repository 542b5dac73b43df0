"""Replicas that train apart, with the real trainer: ranks of the pool, each replica a world of its own."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.errors import CheckpointError
from shoal.train import saving
from tests.train.ranks import run_training, tiny_config
from tests.train.replica_groups import SGD

STREAMING = {"strategy": "streaming_diloco", "every": 4, "fragments": 2, "overlap": 1}


def rounds(result):
    return [line for line in result["lines"] if "round" in line]


def same_weights(left, right):
    return all(np.array_equal(weight, right["weights"][name]) for name, weight in left["weights"].items())


def test_averaging_after_every_step_of_sgd_is_plain_data_parallelism(pool, apart, data, tmp_path):
    values = tiny_config(data, optimizer=SGD)
    plain = pool.run(run_training, 2, tmp_path / "plain", values)[0]
    averaged = tiny_config(data, optimizer=SGD, sync={"strategy": "model_averaging", "every": 1})
    first, second = apart(tmp_path / "apart", averaged)
    assert same_weights(first, second)
    for name, weight in plain["weights"].items():
        np.testing.assert_allclose(first["weights"][name], weight, rtol=2e-5, atol=2e-7, err_msg=name)
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    np.testing.assert_allclose(means, plain["losses"], rtol=2e-6)
    assert first["losses"] != second["losses"]  # each reports its own share of the samples


def test_warm_up_is_plain_data_parallelism_with_any_optimiser(pool, apart, data, tmp_path):
    """AdamW's second moments tell means of gradients from means of steps."""
    values = tiny_config(data, train={"steps": 5}, optimizer={"clip": 0.0}, runtime={"stop_after": 4})
    plain = pool.run(run_training, 2, tmp_path / "plain", values)[0]
    sync = {"strategy": "diloco", "every": 2, "warmup_steps": 4}
    first, second = apart(tmp_path / "apart", values | {"sync": sync})
    assert same_weights(first, second)
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    np.testing.assert_allclose(means, plain["losses"], rtol=2e-6)
    for name, moments in plain["moments"].items():
        for key, moment in moments.items():
            np.testing.assert_allclose(first["moments"][name][key], moment, rtol=1e-3, atol=1e-7)


def test_outer_momentum_follows_the_schedule_of_the_run(apart, data, tmp_path):
    def train(name, kind, **sync):
        sync = {"strategy": "diloco", "every": 2, **sync}
        schedule = {"kind": kind, "warmup_steps": 0}
        values = tiny_config(data, train={"steps": 6}, schedule=schedule, optimizer=SGD, sync=sync)
        return apart(tmp_path / name, values)[0]

    same = train("constant", "constant"), train("paper", "constant", momentum_follows_lr=False)
    assert same_weights(*same)
    apart_then = train("falling", "linear"), train("old steps", "linear", momentum_follows_lr=False)
    assert not same_weights(*apart_then)


@pytest.mark.parametrize(("int8", "share"), [(False, 1.0), (True, 0.26)])
def test_what_travels_is_the_model_once_in_every_round(apart, data, tmp_path, int8, share):
    """A plain all-reduce of two replicas would send as much after every step."""
    sync = {"strategy": "diloco", "every": 3, **({"int8": True, "block": 256} if int8 else {})}
    results = apart(tmp_path, tiny_config(data, train={"steps": 6}, sync=sync))
    size = sum(weight.nbytes for weight in results[0]["weights"].values())
    told = rounds(results[0])
    assert [(line["step"], line["round"], line["replicas"]) for line in told] == [(3, 1, 2), (6, 2, 2)]
    padding = 1.2 if int8 else 1.0  # tiny tensors fill their last blocks badly
    assert all(share * size / padding <= line["sent_bytes"] <= share * size * padding for line in told)
    assert same_weights(*results)


@pytest.mark.parametrize(
    "sync",
    [
        STREAMING,
        pytest.param({"strategy": "diloco", "every": 2, "warmup_steps": 3}, marks=pytest.mark.proof),
        pytest.param({"strategy": "block_momentum", "every": 2}, marks=pytest.mark.proof),
    ],
)
def test_six_steps_are_some_and_a_restart_and_the_rest_bit_for_bit(apart, data, tmp_path, sync):
    """Streaming, the first part ends with a fragment under way, the second half a round later."""
    values = tiny_config(data, train={"steps": 6}, sync=sync)
    whole = apart(tmp_path / "whole", values)
    for stop_after in (2, 3):
        part = apart(
            tmp_path / "parts", values | {"runtime": {**values["runtime"], "stop_after": stop_after}}
        )
        assert [rank["done"] for rank in part] == [False, False]
    state = json.loads((tmp_path / "parts/checkpoints/step-00000002/state.json").read_text())
    assert state["sync"]["flight"] == ([1, 2] if sync is STREAMING else None)
    for left, right in zip(whole, apart(tmp_path / "parts", values), strict=True):
        assert left["losses"] == right["losses"]
        assert same_weights(left, right)
        for name, moments in left["moments"].items():
            for key, moment in moments.items():
                assert np.array_equal(moment, right["moments"][name][key]), (name, key)


@pytest.mark.proof
def test_more_and_fewer_replicas_go_on_and_so_does_any_other_strategy(pool, apart, data, tmp_path):
    sync = {"strategy": "diloco", "every": 2}
    sizes = {"global_batch_size": 12, "micro_batch_size": 2}
    apart(tmp_path, tiny_config(data, train=sizes | {"steps": 4}, sync=sync), replicas=2)
    more = apart(tmp_path, tiny_config(data, train=sizes | {"steps": 6}, sync=sync), replicas=3)
    assert [line["replicas"] for line in rounds(more[0])] == [2, 2, 3]
    assert more[2]["steps"] == [5, 6]
    assert same_weights(more[0], more[2])
    one = apart(tmp_path, tiny_config(data, train=sizes | {"steps": 8}, sync=sync), replicas=1)
    assert [line["replicas"] for line in rounds(one[0])][-1] == 1
    assert (tmp_path / "replicas/1/checkpoints/step-00000006").exists()
    plain = pool.run(run_training, 2, tmp_path, tiny_config(data, train=sizes | {"steps": 10}))[0]
    assert plain["steps"] == list(range(1, 11))
    again = apart(tmp_path, tiny_config(data, train=sizes | {"steps": 12}, sync=sync), replicas=2)
    assert same_weights(*again)


@pytest.mark.parametrize(
    ("inside", "warmup_steps"),
    [
        ({"zero": 2, "dp_shard": 2}, 0),
        pytest.param({"zero": 2, "dp_shard": 2}, 4, marks=pytest.mark.proof),
        ({"tp": 2}, 1),  # the next step ends with an exchange, and the third is saved
        pytest.param({"pp": 2}, 1, marks=pytest.mark.proof),
    ],
)
def test_replicas_cut_inside_train_like_whole_ones_and_take_over_their_state(
    apart, data, tmp_path, inside, warmup_steps
):
    sync = {"strategy": "diloco", "every": 2, "warmup_steps": warmup_steps}
    train = {"steps": 6, "micro_batch_size": 2}
    whole = apart(tmp_path / "whole", tiny_config(data, train=train, sync=sync))
    halted = tiny_config(data, train=train, sync=sync, parallel=inside, runtime={"stop_after": 3})
    apart(tmp_path / "parts", halted, size=2)
    resumed = apart(tmp_path / "parts", tiny_config(data, train=train, sync=sync))
    assert same_weights(*resumed)
    np.testing.assert_allclose(resumed[0]["losses"], whole[0]["losses"], rtol=5e-6)
    np.testing.assert_allclose(resumed[1]["losses"], whole[1]["losses"], rtol=5e-6)


def test_a_borrowed_checkpoint_that_goes_while_it_is_read_is_worth_a_new_start(monkeypatch, tmp_path):
    """The launcher starts no replica again that ended with a ShoalError."""
    monkeypatch.setattr(saving, "_of_first_replica", lambda request, process: tmp_path / "step-00000004")
    stores = SimpleNamespace(latest=lambda: None)
    with pytest.raises(RuntimeError, match="step-00000004 went while it was read") as caught:
        saving.resume(
            SimpleNamespace(
                checkpoints=stores,
                process=None,
                request=SimpleNamespace(init=None),
                replicas=SimpleNamespace(saves=True),
            )
        )
    assert isinstance(caught.value.__cause__, CheckpointError)
