"""A checkpoint of any layout loads under any other, whole and unchanged, and training goes on as before.

Each layout saves once; a layout that loads builds its job once and reads all checkpoints in turn.
"""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import CheckpointStore
from shoal.config.layout import parse_layout
from shoal.models.decoder import TIED
from shoal.train.optimiser import optimiser_tensors
from shoal.train.saving import resume, save
from shoal.train.step import clip, forward_backward, update
from tests.tiny_dataset import random_dataset
from tests.train.ranks import make_job, run_training, whole
from tests.train.test_parity import values_of

STEPS = 3  # before the save
# gpt2 ties its embeddings: under pp, the first and the last stage hold a copy each, and one of them is saved.
STYLES = ("gpt2-dropout", "llama")
LAYOUTS = ("zero3x2", "tp2", "pp2*tp2")  # the proof has them all


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return random_dataset(tmp_path_factory.mktemp("data") / "walk")


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
        loss = forward_backward(job, job.task.batch(step))
        assert update(job, step, loss, clip(job))
    save(job, STEPS)
    job.checkpoints.wait()
    return whole_state(job), forward_backward(job, job.task.batch(STEPS + 1))


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
        loaded.append((whole_state(job), forward_backward(job, job.task.batch(STEPS + 1))))
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


def test_any_layout_loads_under_any_other(pool, data, tmp_path):
    check_matrix(pool, data, tmp_path, LAYOUTS, STYLES[0])


def test_both_stages_that_hold_a_tied_embedding_load_it(pool, data, tmp_path):
    """Only the first one saves it; the last must get weight and moments all the same."""
    one, two = parse_layout("1"), parse_layout("pp2")
    ((state, _),) = pool.run(save_and_go_on, 1, tmp_path / "1", values_of(data, one, "gpt2"))
    ranks = pool.run(load_each, 2, tmp_path / "pp2", values_of(data, two, "gpt2"), [tmp_path / "1"])
    for ((loaded, _),) in ranks:
        for name in (f"model.{TIED}", f"optimizer.{TIED}.exp_avg", f"optimizer.{TIED}.exp_avg_sq"):
            assert np.array_equal(loaded[name], state[name])


@pytest.mark.parametrize(
    ("first", "then", "style"),
    [
        ("tp2+sp", "pp2+interleaved", "gpt2-dropout"),
        ("zero2x2", "dp2*tp2", "llama-dropout"),
        ("pp2*tp2", "1", "gpt2"),
        pytest.param("dp2", "tp2", "gpt2-dropout", marks=pytest.mark.proof),
        pytest.param("pp2", "zero3x2", "gpt2", marks=pytest.mark.proof),
        pytest.param("1", "dp2*zero3x2", "llama", marks=pytest.mark.proof),
    ],
)
def test_a_run_goes_on_under_another_layout(pool, data, tmp_path, first, then, style):
    length = {"train": {"steps": 6}}
    expected = pool.run(
        run_training, 1, tmp_path / "whole", values_of(data, parse_layout("1"), style, **length)
    )[0]
    for words, halt in ((first, {"runtime": {"device": "cpu", "threads": 1, "stop_after": 3}}), (then, {})):
        layout = parse_layout(words)
        values = values_of(data, layout, style, **length, **halt)
        got = pool.run(run_training, layout.world_size, tmp_path / "parts", values)[0]
    assert got["steps"] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=2e-6)
    np.testing.assert_allclose(got["norms"], expected["norms"], rtol=2e-6)
