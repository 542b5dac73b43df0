"""A trace on demand, and phases timed without waiting for a GPU."""

import json

import pytest
import torch

from shoal.config import rules
from shoal.config.load import validate
from shoal.errors import ConfigError
from shoal.runtime.device import Device
from shoal.train.clock import StepClock
from tests.train.ranks import run_training, tiny_config


def trace(path):
    """Return how often each name occurs among the events of a trace."""
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    return {name: names.count(name) for name in set(names)}


def test_each_rank_traces_the_steps_of_the_window_and_the_result_stays(pool, data, tmp_path):
    values = tiny_config(data)
    plain = pool.run(run_training, 2, tmp_path / "plain", values)
    values["train"]["profile"] = [2, 3]
    traced = pool.run(run_training, 2, tmp_path / "traced", values)
    assert traced[0]["losses"] == plain[0]["losses"]
    for rank in range(2):
        counts = trace(tmp_path / f"traced/profile/rank-{rank}-steps-2-3.json")
        assert counts["backward"] == 2 * 2  # two steps of two micro-steps
        assert any("mm" in name for name in counts)
    assert not (tmp_path / "plain/profile").exists()


def test_a_run_that_stops_inside_the_window_writes_what_there_is_and_the_next_one_the_rest(
    pool, data, tmp_path
):
    values = tiny_config(data, train={"profile": [2, 5]}, runtime={"stop_after": 3})
    pool.run(run_training, 1, tmp_path, values)
    pool.run(run_training, 1, tmp_path, tiny_config(data, train={"profile": [2, 5]}))
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank-0-steps-2-3.json", "rank-0-steps-4-5.json"]
    assert all(trace(tmp_path / "profile" / name)["optimiser"] for name in names)


@pytest.mark.parametrize("window", [[3], [1, 2, 3], [4, 3], [5, 6], [6, 6]])
def test_a_window_outside_the_run_is_refused(window):
    config = validate(tiny_config("data", train={"profile": window}), "test")
    with pytest.raises(ConfigError, match=r"train.profile = \[.*\] is outside of steps 1 to 5"):
        rules.check(config, 1)


def test_a_window_of_one_step_is_one():
    rules.check(validate(tiny_config("data", train={"profile": [5, 5]}), "test"), 1)


class FakeEvent:
    """A GPU event whose time is known once the device was waited for."""

    ticks = iter(range(100))
    done = False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.tick = next(self.ticks)

    def synchronize(self):
        FakeEvent.done = True

    def elapsed_time(self, other):
        assert FakeEvent.done
        return 1000.0 * (other.tick - self.tick)


def test_phases_of_a_gpu_wait_for_it_when_they_are_read_and_not_before(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = StepClock(Device(torch.device("cuda", 0), "cpu:gloo,cuda:nccl", "GPU"))
    for _ in range(2):
        FakeEvent.done = False
        clock.begin()
        with clock.phase("forward"):
            pass
        with clock.phase("forward"):
            pass
        time = clock.end()
        assert not FakeEvent.done
        seconds, phases = time.read()
        assert (seconds, phases["forward"]) == (5.0, 2.0)
