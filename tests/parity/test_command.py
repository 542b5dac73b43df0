"""`shoal parity`: layouts that agree, one all-reduce left out, and what is refused before anything starts."""

import json

import pytest

from shoal.config.layout import parse_layout
from shoal.config.load import validate
from shoal.config.sections import Sync
from shoal.errors import InputError
from shoal.parity import command
from shoal.parity.command import parity, suspect_of
from tests import commands
from tests.cases import every
from tests.parity.sabotage import break_one_all_reduce
from tests.tiny_dataset import random_dataset
from tests.train.ranks import TINY

LLAMA = {"style": "llama", "n_heads": 4, "n_kv_heads": 2}
OUTPUTS = ["embed", "blocks.0", "blocks.1", "norm"]
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


def config_of(model=(), **sections):
    values = {**TINY, "model": {**TINY["model"], **dict(model)}, "optimizer": {"lr": 1e-3}, **sections}
    return validate(values, "test")


@pytest.mark.parametrize("model", every(2, [LLAMA | DROPOUT, DROPOUT]), ids=["llama", "gpt2"])
def test_layouts_agree_with_one_process(tmp_path, capsys, model):
    status = parity(config_of(model), "dp2, zero3x2, tp2+sp, pp2", steps=3, json=tmp_path / "parity.json")
    report = json.loads((tmp_path / "parity.json").read_text())
    screen = capsys.readouterr().out
    assert status == 0, screen
    assert [row["layout"] for row in report["layouts"]] == ["dp2", "zero3x2", "tp2+sp", "pp2"]
    for row in report["layouts"]:
        assert row["verdict"] == "rounding"
        assert row["first"] is None
        assert f"{row['layout']}: rounding. Losses differ by at most" in screen
        kinds = [finding["kind"] for finding in row["findings"]]
        assert kinds.count("gradient") == kinds.count("weight") == kinds.count("start") > 10
        assert (kinds.count("loss"), kinds.count("norm"), kinds.count("validation")) == (3, 3, 1)
        assert [f["name"] for f in row["findings"] if f["kind"] == "output"] == OUTPUTS
        assert all(f["difference"] <= f["allowed"] for f in row["findings"])
        assert any(f["difference"] > 0 for f in row["findings"])  # it is another run that was compared
    keys = [f"blocks.{layer}.attention.k.bias" for layer in range(2)]
    assert report["below_floor"] == ([] if "style" in model else keys)


def test_one_all_reduce_left_out_is_found_and_named(tmp_path, capsys):
    file = tmp_path / "parity.json"
    status = parity(
        config_of(), "dp2, tp2, tp2+sp, pp2, zero2x2", steps=2, json=file, run=break_one_all_reduce
    )
    rows = {row["layout"]: row for row in json.loads(file.read_text())["layouts"]}
    screen = capsys.readouterr().out
    assert status == 1
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "dp2": "bug",
        "tp2": "bug",
        "tp2+sp": "bug",
        "pp2": "bug",
        "zero2x2": "rounding",
    }
    assert {name: row["first"] and row["first"]["name"] for name, row in rows.items()} == {
        "dp2": "norm.bias",  # all gradients: the last one is the first of the backward pass
        "tp2": "blocks.1.mlp_norm.bias",  # what was not summed enters the MLP of block 1
        "tp2+sp": "blocks.1",  # what its attention puts out, forward
        "pp2": "embed.weight",  # and no other
        "zero2x2": None,
    }
    wrong = {
        name: [f["name"] for f in row["findings"] if f["kind"] == "gradient" and f["parts_ways"]]
        for name, row in rows.items()
    }
    assert wrong["pp2"] == ["embed.weight"]
    assert not any(name.startswith("blocks.1.mlp.") for name in wrong["tp2"])
    assert "dp2: a bug, in data parallelism (dp2)." in screen
    assert "is blocks.1.mlp_norm.bias, on rank" in screen
    assert "tp2+sp: a bug, in tensor parallelism (tp2+sp)." in screen  # without +sp it is broken, too
    assert "The forward pass of step 1 parts ways in blocks.1: the size of what it puts out differs" in screen


def test_the_axis_to_blame_is_sought_among_those_of_the_layout():
    def fails(*bad):
        return lambda words: words in bad

    assert suspect_of(parse_layout("pp2*tp2"), fails("tp2")) == "in tensor parallelism (tp2 alone fails)"
    assert suspect_of(parse_layout("pp2*tp2"), fails()).startswith("in how pp2 and tp2 work together")
    sequence = suspect_of(parse_layout("dp2*tp2+sp"), fails("tp2+sp"))
    assert sequence == "in sequence parallelism (tp2 without it agrees)"
    assert suspect_of(parse_layout("pp2+gpipe"), fails()).startswith("in the schedule gpipe")


@pytest.fixture
def no_process(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a process was started")

    monkeypatch.setattr(command, "WorkerPool", refuse)


@pytest.mark.parametrize(
    ("layouts", "options", "sentence"),
    [
        ("dp2, tp3", {}, r"layout tp3: model\.n_heads = 2 is not divisible by parallel\.tp = 3"),
        ("zero1x3", {}, r"layout zero1x3: train\.global_batch_size = 16 does not divide among 3"),
        ("dp2", {"reference": "pp3"}, r"layout pp3: model\.n_layers = 2 over 3 pipeline stages"),
        ("dp2, quick2", {}, r"'quick2' in layout 'quick2' is no layout word"),
        (" , ", {}, r"--layouts names no layout"),
        ("dp2", {"steps": 0}, r"--steps 0: at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(no_process, layouts, options, sentence):
    with pytest.raises(InputError, match=sentence):
        parity(config_of(), layouts, **options)


def test_replicas_that_train_apart_are_refused(no_process):
    config = config_of().model_copy(update={"sync": Sync(strategy="diloco")})
    with pytest.raises(InputError, match="parity compares processes that take the same steps"):
        parity(config, "dp2")


@pytest.mark.proof
def test_the_command_takes_a_dataset_another_reference_and_settings(tmp_path):
    data = random_dataset(tmp_path / "walk")
    settings = [f"--model.{name}={value}" for name, value in TINY["model"].items()]
    settings += [f"--train.seq_len={TINY['train']['seq_len']}", "--runtime.threads=1"]
    words = ["parity", "tiny", "--layouts", "tp2", "--reference", "dp2", "--data", data, "--steps", "2"]
    done = commands.run(*words, "--json", tmp_path / "parity.json", *settings)
    assert done.returncode == 0, done.stderr
    assert "largest difference from dp2" in done.stdout
    assert json.loads((tmp_path / "parity.json").read_text())["reference"] == "dp2"
