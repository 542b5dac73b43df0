"""`shoal bench layouts`: real runs side by side, their figures, and what a layout that fails costs."""

import json
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from shoal.bench import layouts
from shoal.bench.layouts import Column, command, read_run
from shoal.config.layout import parse_layout
from shoal.config.load import config_from_toml, load_config
from shoal.errors import InputError
from shoal.train.clock import PHASES
from tests.tiny_dataset import random_dataset


def ask(words, data, *, steps=6, runs=None, output=None):
    """Run the command in this process, with a double in place of training."""
    overrides = {
        "data": {"datasets": [str(data)]},
        "train": {"steps": steps},
        "eval": {"every": 6},
        "checkpoint": {"every": 0},
        "precision": {"dtype": "fp32"},
    }
    chosen = [parse_layout(word) for word in words.split(",")]
    with mock.patch("shoal.launch.forking.load"):
        return command(load_config("tiny", overrides), "tiny", chosen, 2, runs, output, None)


@pytest.mark.proof
def test_layouts_are_trained_and_compared_and_the_record_is_continued(tmp_path, monkeypatch, capsys):
    data, record, picture = random_dataset(tmp_path / "data"), tmp_path / "r.json", tmp_path / "r.png"
    words = ["--data", data, "--steps", 6, "--warmup", 2, "--output", record, "--plot", picture]
    words += ["--precision.dtype", "fp32", "--runs", tmp_path / "runs"]
    run = [sys.executable, "-m", "shoal", "bench", "layouts", "tiny", "--layouts", "1, zero3x2, tp3"]
    done = subprocess.run([*run, *map(str, words)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("of which shard", "test perplexity", "tp3: refused: model.n_heads = 4 is not divisible"):
        assert text in done.stdout
    assert "of which tp" not in done.stdout  # takes no time here
    told = json.loads(record.read_text())
    assert {"commit", "machine", "versions"} <= told.keys()
    one, sharded, _ = told["rows"]
    assert [row["status"] for row in told["rows"]] == ["done", "done", "refused"]
    assert one["losses"] == pytest.approx(sharded["losses"], rel=2e-6)
    assert one["losses"][-1] < one["losses"][0]
    assert (one["parameters"], sharded["parameters"]) == (850_688, 425_344)
    assert sharded["peak_bytes_of_all"] > sharded["peak_bytes"] > 50e6
    assert len(one["seconds"]) == len(one["phases_s"]["backward"]) == 4
    assert one["found"].keys() == {f"{a}_{b}" for a in ("validation", "test") for b in ("loss", "perplexity")}
    assert one["found"] == pytest.approx(sharded["found"], rel=1e-5)
    assert (tmp_path / "runs/run-zero3x2/ranks/rank-1/log").exists()
    assert picture.read_bytes().startswith(b"\x89PNG")

    trained = []
    monkeypatch.setattr(
        layouts, "train", lambda words, *_: trained.append(words) or ("failed", "rank 1 fell")
    )
    assert ask("1,zero3x2", shutil.copytree(data, tmp_path / "elsewhere"), output=record) == 0
    assert not trained
    assert ask("1,dp2", data, output=record) == 1
    assert len(trained) == 1
    assert "dp2: failed: rank 1 fell" in capsys.readouterr().out
    assert [row["status"] for row in json.loads(record.read_text())["rows"]][-1] == "failed"
    with pytest.raises(InputError, match="is the record of other measurements"):
        ask("1", data, output=record, steps=7)


def step(seconds, **more):
    shares = {"data": 0.1, "forward": 0.3, "backward": 0.4, "tp": 0.2, "optimiser": 0.1}
    phases = {f"{name}_s": seconds * shares.get(name, 0.0) for name in PHASES}
    return {"step": 1, "loss": 2.0, "seconds": seconds, **phases, **more}


def test_times_are_those_of_the_middle_half_after_the_warm_up_and_add_up():
    memory = {"most_parameters": 7.0, "most_peak_bytes": 5.0, "peak_bytes": 8.0}
    lines = [
        step(90.0, **memory),
        *(step(seconds) for seconds in (50.0, 1.0, 3.0, 0.01)),
        step(2.0),
        step(2.0),
    ]
    lines += [step(2.0, **memory), {"step": 8, "validation_loss": 1.5}]
    column = read_run("tp2", lines, 1)
    ms = column.ms()
    assert ms["step"] == pytest.approx(2000)  # of 0.01, 1, 2, 2, 2, 3 and 50 s
    assert (ms["forward"], ms["tp"], ms["other"]) == pytest.approx((600, 400, 200))
    parts = column.parts()
    whole = sum(parts[name] for name in ("forward and backward", *PHASES[3:], "data", "other"))
    assert whole == pytest.approx(ms["step"])
    assert (column.parameters, column.peak_bytes, column.found) == (7, 5, {"validation_loss": 1.5})


def test_a_run_that_fails_costs_its_own_column(tmp_path, monkeypatch, capsys):
    data = random_dataset(tmp_path / "data")
    monkeypatch.setattr(layouts, "read_metrics", lambda path: None)
    monkeypatch.setattr(layouts, "read_run", lambda layout, *_: made_up(layout))
    monkeypatch.setattr(
        layouts, "train", lambda words, ranks, *_: ("failed", "out of memory") if ranks == 2 else ("done", "")
    )
    runs = tmp_path / "runs"
    assert ask("zero3x2,1", data, runs=runs) == 1
    (asked,) = runs.glob("zero3x2-*.toml")
    config = config_from_toml(asked.read_text(), "asked")
    assert (config.parallel.zero, config.parallel.dp_shard, config.train.steps) == (3, 2, 6)
    shown = capsys.readouterr().out
    assert "zero3x2: failed: out of memory" in shown
    assert "speed (1 = 1)" in shown
    assert ask("1", data) == 0
    monkeypatch.setattr(layouts, "train", lambda *_: ("refused", "no such cut"))
    assert ask("dp2", data) == 1  # nothing was measured


def made_up(layout):
    phases = {name: [0.1] * 4 for name in PHASES}
    return Column(layout, "done", "", 9, 10, 20, [1.0] * 4, phases, [2.0] * 6, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layouts", "dq2"), "'dq2' in layout 'dq2' is no layout word"),
        (("--layouts", " , "), "--layouts names no layout"),
        (("--layouts", "1", "--steps", "5", "--warmup", "2"), "--steps 5 --warmup 2: at least 4 steps"),
        (("--layouts", "1", "--steps", "9", "--train.steps", "9"), "--steps and --train.steps set the same"),
        (("--layouts", "1", "--data", "nowhere"), "there is no dataset folder"),
        (("--layouts", "1", "--plot", "nowhere/x.png"), "nowhere/x.png: there is no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(words, message):
    from shoal.cli import app as cli

    with pytest.raises(InputError) as error:
        cli.app(["bench", "layouts", "tiny", *words], result_action="return_value", exit_on_error=False)
    assert message in str(error.value)
