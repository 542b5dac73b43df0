"""`shoal bench convergence`: curves of real trainings over seeds, their spread, and what is rejected."""

import json
from pathlib import Path

import pytest

from shoal.bench.cells import Cell, CellResult, Network, parse_way
from shoal.bench.convergence import ConvergenceOptions, Epoch, epochs, groups, runs_of, table
from shoal.bench.measured import measured
from shoal.errors import InputError
from tests import commands

NETWORK = """
input = [1, 28, 28]
classes = 10
[[layers]]
kind = "flatten"
[[layers]]
kind = "linear"
out = 32
[[layers]]
kind = "relu"
[[layers]]
kind = "linear"
out = "classes"
"""


def prepared(folder: Path, *words: str) -> Path:
    assert commands.run("prepare", *words, "--output", folder, timeout=120).returncode == 0
    return folder


@pytest.mark.proof
def test_the_digits_are_learned_with_every_seed(tmp_path):
    data = prepared(tmp_path / "digits", "sklearn-digits", "--split", "80,20,0")
    (tmp_path / "small.toml").write_text(NETWORK)
    record, picture = tmp_path / "r.json", tmp_path / "p.png"
    words = [
        str(tmp_path / "small.toml"),
        "--data",
        str(data),
        "--epochs",
        "2",
        "--seeds",
        "2",
        "--lr",
        "0.05",
    ]
    words += ["--runs", str(tmp_path / "runs"), "--output", str(record), "--plot", str(picture)]
    done = commands.run("bench", "convergence", *words, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "small, 1 worker, batch 128, 2 seeds: mean ± standard deviation" in " ".join(done.stdout.split())
    first, second = json.loads(record.read_text())["cells"]
    assert [cell["settings"]["train.seed"] for cell in (first, second)] == ["1", "2"]
    assert first["losses"] != second["losses"]  # of other weights and another order
    for cell in (first, second):
        assert [point["step"] for point in cell["curve"]] == [0, 12, 24]  # 1,438 examples by 128
        assert cell["curve"][1]["epoch"] == pytest.approx(12 * 128 / 1438)
        assert cell["curve"][-1]["accuracy"] > 0.7  # a tenth by chance
    assert picture.read_bytes().startswith(b"\x89PNG")


def result(seed: int, losses: list[float], accuracies: list[float]) -> CellResult:
    network = Network(f"net seed {seed}", "fcn-r", Path("data"), 8)
    lines = [
        {"step": n, "loss": loss, "seconds": 0.5, "communication_s": 0.0} for n, loss in enumerate(losses, 1)
    ]
    for number, accuracy in enumerate(accuracies, 1):
        lines.append({"step": 2 * number, "validation_loss": 1.0 / seed, "validation_accuracy": accuracy})
    found = measured(lines, steps_per_epoch=2.0)
    return CellResult(Cell(network, parse_way("allreduce", 4), 1, "local", 4), "done", found)


def test_an_epoch_has_the_mean_training_loss_of_its_own_steps():
    several = [result(1, [4.0, 2.0, 1.0, 0.0], [0.5, 0.75]), result(2, [8.0, 6.0, 3.0, 1.0], [0.25, 1.0])]
    assert list(epochs(runs_of(several))) == [
        Epoch(1.0, [1.0, 1.0], [3.0, 7.0], [1.0, 0.5], [0.5, 0.25]),
        Epoch(2.0, [2.0, 2.0], [0.5, 2.0], [1.0, 0.5], [0.75, 1.0]),
    ]
    assert [(name, len(alike)) for name, alike in groups(several)] == [("net, 1 worker", 2)]


@pytest.mark.parametrize(
    ("count", "first", "rows"), [(1, "1.0", 1), (12, "1.0", 12), (25, "1.0", 9), (26, "2.0", 9)]
)
def test_a_long_table_ends_with_the_last_epoch(count, first, rows):
    shown = table("net", [result(1, [1.0] * 2 * count, [0.5] * count)])
    epochs_shown = list(shown.columns[0].cells)
    assert (epochs_shown[0], epochs_shown[-1], len(epochs_shown)) == (first, f"{count}.0", rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": 0}, "must be at least 1"),
        ({"data": 3}, "3 datasets for 1 network"),
        ({"data": 1}, "random images, of which nothing can be learned"),
    ],
)
def test_what_cannot_be_measured_is_rejected(tmp_path, given, said):
    (tmp_path / "manifest.json").write_text(json.dumps({"inputs": {"inputs": ["random-images:3x8x8:10"]}}))
    options = {"epochs": 1, "seeds": 1, "workers": (1,), "batch_size": 8, "settings": {}, "runs": None}
    options |= given | {"data": (tmp_path,) * given.get("data", 0)}
    with pytest.raises(InputError, match=said):
        ConvergenceOptions(("fcn-r",), **options).check()
