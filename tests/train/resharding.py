"""Checkpoints of one layout that another one goes on from."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import CheckpointStore
from shoal.config.layout import parse_layout
from shoal.train.optimiser import optimiser_tensors
from shoal.train.saving import resume, save
from shoal.train.step import update
from tests.train.layouts import values_of
from tests.train.ranks import make_job, result_of, whole

STEPS = 3  # before the save
# gpt2 ties its embeddings: under pp, the first and the last stage hold a copy each, and one of them is saved.
STYLES = ("gpt2-dropout", "llama")


def matrix_values(data, layout, style):
    """Return a configuration with heads enough for tp 4, and fewer key heads in the llama style."""
    values = values_of(data, layout, style)
    heads = {"n_heads": 8, "n_kv_heads": 4} if style == "llama" else {}
    return values | {"model": values["model"] | heads}


def state_of(job):
    """Name all that a checkpoint holds of this rank: weights and moments."""
    weights = job.model.named_weights()
    moments = optimiser_tensors(job.model.updated_weights(), job.optimiser)
    return {f"model.{name}": t.detach() for name, t in weights.items()} | {
        f"optimizer.{name}": t for name, t in moments.items()
    }


def whole_state(job):
    return {name: whole(tensor) for name, tensor in state_of(job).items()}


def save_and_go_on(run_dir, values):
    """Train some steps and save; return everything that was saved, whole, and the loss of the next step."""
    job = make_job(run_dir, values)
    for step in range(1, STEPS + 1):
        assert update(job, result_of(job, step))
    save(job, STEPS)
    job.checkpoints.wait()
    return whole_state(job), result_of(job, STEPS + 1).loss


def load_each(run_dir, values, folders):
    """Load other runs' checkpoints in turn; return for each: what was loaded, whole, and the next loss."""
    job = make_job(run_dir, values)
    loaded = []
    for folder in folders:
        for tensor in state_of(job).values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(torch.nan)
        job.checkpoints = CheckpointStore(folder / "checkpoints", group=job.process.saving)
        assert resume(job) == STEPS
        loaded.append((whole_state(job), result_of(job, STEPS + 1).loss))
    return loaded


def check_matrix(pool, data, folder, layouts, style):
    """Save under each layout, load each of them under each."""
    cut = {words: parse_layout(words) for words in layouts}
    saved = {}
    for words, layout in cut.items():
        values = matrix_values(data, layout, style)
        ranks = pool.run(save_and_go_on, layout.world_size, folder / words, values, timeout=120)
        saved[words] = together([state for state, _ in ranks]), ranks[0][1]
    for words, layout in cut.items():
        values, folders = matrix_values(data, layout, style), [folder / source for source in layouts]
        target = folder / f"under-{words}"
        ranks = pool.run(load_each, layout.world_size, target, values, folders, timeout=300)
        for (source, (state, loss)), *loads in zip(saved.items(), *ranks, strict=True):
            check_equal(together([part for part, _ in loads]), state, f"{source} loaded under {words}")
            np.testing.assert_allclose(loads[0][1], loss, rtol=2e-6, err_msg=f"{source} under {words}")


def together(parts):
    """Merge what the ranks hold; what several of them hold must be the same."""
    state = {}
    for part in parts:
        for name, array in part.items():
            assert np.array_equal(array, state.setdefault(name, array)), name
    return state


def check_equal(loaded, saved, where):
    assert loaded.keys() == saved.keys(), where
    for name, array in saved.items():
        assert loaded[name].dtype == array.dtype, (where, name)
        assert np.isfinite(array).all(), (where, name)
        assert np.array_equal(loaded[name], array), (where, name)
