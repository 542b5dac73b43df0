"""The loop, its saves and its records with a job that stands in for a real one."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from shoal.config.load import validate
from shoal.errors import ShoalError
from shoal.train import loop, saving
from shoal.train.evaluate import validation_is_due
from shoal.train.metrics import Metrics
from tests.train.ranks import tiny_config


def job_of(**sections):
    config = validate(tiny_config("data", **sections), "test")
    return MagicMock(config=config, evaluation_pending=False, saved_step=None)


@pytest.mark.parametrize(
    ("every", "steps"), [(4, [4, 8, 10]), (5, [5, 10]), (1, list(range(1, 11))), (0, [])]
)
def test_a_validation_is_due_every_so_many_steps_and_at_the_last_one(every, steps):
    job = job_of(train={"steps": 10}, eval={"every": every})
    assert [step for step in range(1, 11) if validation_is_due(job.config, step)] == steps


def test_a_save_that_failed_ends_training_with_the_step_in_which_it_is_known(monkeypatch):
    """Not with the next save: until then there would be nothing new to go on from."""
    job = job_of(train={"steps": 9}, eval={"every": 0}, checkpoint={"every": 0})
    job.replicas.start.return_value = 2
    job.replicas.stopping.return_value = False
    job.task.batch = lambda step: SimpleNamespace(step=step)
    for name in ("resume", "forward_backward", "agree", "update", "save"):
        monkeypatch.setattr(loop, name, MagicMock())
    job.checkpoints.poll.side_effect = [None, ShoalError("the disk is full")]
    with pytest.raises(ShoalError, match="the disk is full"):
        loop.train(job)
    assert [call.args[0] for call in job.metrics.facts.call_args_list] == [3, 4]


@pytest.mark.parametrize(
    ("done", "stopped", "steps"), [(True, False, [3, 4]), (False, True, []), (False, False, [3, 4])]
)
def test_a_validation_that_a_stop_cut_short_is_made_up_before_training_goes_on(
    monkeypatch, done, stopped, steps
):
    job = job_of(train={"steps": 4}, eval={"every": 0}, checkpoint={"every": 0})
    job.evaluation_pending = True
    job.replicas.start.return_value = 2
    job.replicas.stopping.side_effect = lambda step, asked: stopped
    job.task.batch = lambda step: SimpleNamespace(step=step)
    for name in ("resume", "forward_backward", "agree", "update", "save", "evaluate"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "validate", lambda job, step: setattr(job, "evaluation_pending", not done))
    loop.train(job)
    assert [call.args[0] for call in job.metrics.facts.call_args_list] == steps


def test_what_several_parts_hold_is_loaded_by_each_and_saved_by_one(monkeypatch):
    job = job_of()
    weight = torch.zeros(2)
    job.model.named_weights.return_value = {"embed.weight": weight, "norm.weight": weight}
    job.model.tied_duplicates = ["embed"]
    job.replicas.tensors.return_value = {"momentum.norm.weight": weight}
    moments = {"embed.weight.exp_avg": weight, "norm.weight.exp_avg": weight}
    monkeypatch.setattr(saving, "optimiser_tensors", lambda named, optimiser: moments)
    job.replicas.expect.return_value = {}
    assert set(saving._expected(saving.entries_of(job), {})) == {
        "model.embed.weight",
        "model.norm.weight",
        "optimizer.embed.weight.exp_avg",
        "optimizer.norm.weight.exp_avg",
    }
    assert set(saving._tensors(job)) == {
        "model.norm.weight",
        "optimizer.norm.weight.exp_avg",
        "sync.momentum.norm.weight",
    }


def test_a_start_drops_records_of_later_steps_and_of_the_finished_model(tmp_path):
    told = [{"step": 1}, {"step": 2}, {"step": 2, "validation_loss": 3.0}, {"step": 2, "test_loss": 3.0}]
    told += [{"step": 3}, {"step": 3, "test_loss": 3.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in told))
    metrics = SimpleNamespace(
        _path=path, _process=SimpleNamespace(rank=0), _sinks=MagicMock(), _curve=MagicMock()
    )
    Metrics.start(metrics, 2, SimpleNamespace(traffic=None))
    assert [json.loads(line) for line in path.read_text().splitlines()] == told[:3]
