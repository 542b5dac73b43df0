"""Which windows an evaluation takes during training: the fixed sample, at any step and in any layout."""

import itertools

import numpy as np
import pytest
import torch.distributed as dist

from shoal.data.loader import fixed_sample
from shoal.train.loop import train
from tests.tiny_dataset import random_dataset
from tests.train.ranks import make_job, tiny_config


def evaluated(run_dir, values):
    """Train; return the first tokens of the windows that count in each evaluation, over all ranks."""
    job = make_job(run_dir, values)
    mesh, found = job.model.mesh, []
    honest = job.task.eval_batches

    def note(*args):
        found.append([])
        for micro, samples, targets, valid in honest(*args):
            if valid and mesh.is_loss_rank:
                found[-1] += micro.tokens_bt[:, :4].tolist()
            yield micro, samples, targets, valid

    job.task.eval_batches = note
    train(job)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    windows = job.task.data.samples("validation")
    due = windows.read(fixed_sample(windows, job.config.eval.sequences))[:, :4]
    return [sorted(itertools.chain(*parts)) for parts in zip(*everyone, strict=True)], sorted(due.tolist())


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [(1, {}), (1, {"train": {"seed": 9, "steps": 5}}), (3, {"train": {"global_batch_size": 12, "steps": 5}}),
     (2, {"parallel": {"tp": 2}}), (2, {"parallel": {"pp": 2}})],
    ids=["alone", "seed", "replicas", "tp", "pp"],
)  # fmt: skip
def test_every_evaluation_takes_the_fixed_sample(pool, tmp_path, world_size, sections):
    data = random_dataset(tmp_path / "data")
    values = tiny_config(data, eval={"every": 2, "sequences": 7, "batch_size": 2}, **sections)
    for found, due in pool.run(evaluated, world_size, tmp_path / "run", values):
        after_2, after_4, after_5, test = found
        assert after_2 == after_4 == after_5 == due
        assert len(test) == 7
        assert test != due  # another split
    assert len(np.unique(due, axis=0)) == 7
