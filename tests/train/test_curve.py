"""The loss curve: what is drawn, and when."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from shoal.train import curve
from shoal.train.curve import Curve
from tests.train.ranks import run_training, tiny_config


@pytest.fixture
def drawn(monkeypatch):
    """Figures, in place of their files."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_steps_smoothed_training_and_every_validation_are_drawn(drawn, tmp_path):
    loss = Curve(tmp_path / "run/loss.png", "tokens")
    for step in range(1, 4001):
        loss.add({"step": step, "loss": 3.0 + (-1) ** step})
        if step % 100 == 0:
            loss.add({"step": step, "validation_loss": 3.5})
    loss.add({"step": 4001, "loss": math.nan})
    loss.add({"step": 4001, "loss": "edited"})
    assert loss.draw()
    (axes,) = drawn[0].axes
    raw, smoothed, validation = axes.lines
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == (
        "step",
        "loss (nats per token)",
        "run",
    )
    assert len(raw.get_xdata()) == 2000
    assert raw.get_alpha() < 0.5
    assert smoothed.get_ydata() == pytest.approx(np.full(2000, 3.0), abs=0.05)
    assert smoothed.get_xdata()[-1] == 3999
    assert validation.get_xdata().tolist() == list(range(100, 4001, 100))


def test_a_short_run_is_drawn_as_it_is(drawn, tmp_path):
    loss = Curve(tmp_path / "loss.png", "tokens")
    assert not loss.draw()
    for step in (1, 2, 3):
        loss.add({"step": step, "loss": float(step)})
    assert loss.draw()
    raw, smoothed = drawn[0].axes[0].lines
    assert raw.get_ydata().tolist() == smoothed.get_ydata().tolist() == [1.0, 2.0, 3.0]


def test_drawing_takes_a_fiftieth_of_the_time(drawn, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(curve.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: (drawn.append(1), now.__setitem__(0, now[0] + 1)))
    loss = Curve(tmp_path / "loss.png", "tokens")
    loss.add({"step": 1, "loss": 1.0})
    for moment, count in ((100.0, 1), (102.0, 1), (150.0, 1), (151.5, 2)):
        now[0] = moment
        loss.draw_if_time()
        assert len(drawn) == count


def drawings(run_dir, values):
    """Train; return the steps of the training losses that each drawing had."""
    found, honest = [], Curve.draw
    curve._REST, rest = 0, curve._REST
    Curve.draw = lambda self: found.append([step for step, _ in self._train]) or honest(self)
    try:
        run_training(run_dir, values, draws=True)
    finally:
        Curve.draw, curve._REST = honest, rest
    return [steps[-1] for steps in found], [len(steps) for steps in found]


def test_it_is_drawn_at_each_evaluation_and_at_a_stop_and_goes_on_after_it(pool, data, tmp_path):
    values = tiny_config(data, eval={"every": 2})
    stopped = {**values, "runtime": {**values["runtime"], "stop_after": 3}}
    assert pool.run(drawings, 2, tmp_path, stopped)[0] == ([2, 3], [2, 3])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert pool.run(drawings, 2, tmp_path, values)[0] == ([4, 5, 5], [4, 5, 5])
