"""Shoal's trainer beside PyTorch's adapter, and the adapters on a device, as far as a CPU shows it."""

import argparse
import json
import os

import pytest

from benchmarks import networks
from benchmarks.c_library import SETTINGS
from shoal.bench.networks import Cell, Row
from shoal.networks.description import read


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_shoal_and_pytorch_take_turns_on_the_same_network(tmp_path):
    words = ["trainer", "--networks", "alexnet-r", "--batch", "4", "--steps", "3", "--warmup", "1"]
    assert networks.main([*words, "--repeats", "2", "--output", str(tmp_path / "record.json")]) == 0
    found = json.loads((tmp_path / "record.json").read_text())["networks"]["alexnet-r"]
    assert found["parameters"] == read("alexnet-r").resolve().num_parameters
    assert {name: [len(part) for part in parts] for name, parts in found["step_s"].items()} == {
        "shoal": [3, 3],
        "pytorch": [3, 3],
        "pytorch with C library settings": [3, 3],
    }
    medians = found["median_s"]
    for peer, ratio in found["ratio"].items():
        assert ratio == pytest.approx(medians[peer] / medians["shoal"])


def test_a_network_that_fails_costs_itself_only(tmp_path, monkeypatch):
    def measured(wish, name, *_):
        if name == "fcn-r":
            raise RuntimeError("it fell over")
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(networks, "ours", measured)
    monkeypatch.setattr(networks, "plain", lambda options, settings: [6.0, 4.0 if settings else 5.0, 3.0])
    words = ["trainer", "--networks", "fcn-r", "lstm", "--batch", "2", "--output", str(tmp_path / "r.json")]
    assert networks.main(words) == 1
    found = json.loads((tmp_path / "r.json").read_text())["networks"]
    assert found["fcn-r"]["failed"] == "it fell over"
    assert found["lstm"]["ratio"] == {"pytorch": 2.5, "pytorch with C library settings": 2.0}


def test_the_adapter_inherits_the_settings_of_its_turn(monkeypatch):
    def measured(options, rows, keep):
        given = {name: os.environ.get(name) for name in SETTINGS}
        keep(Row(Cell("net", "pytorch", "default", 1, 1), "done", samples=[float(given == SETTINGS)]))

    monkeypatch.setattr(networks, "measure", measured)
    assert networks.PEERS["pytorch"] == {}
    assert [networks.plain(None, settings) for settings in networks.PEERS.values()] == [[0.0], [1.0]]


@pytest.mark.parametrize("name", ["fcn-r", "lstm"])
def test_shoal_trains_on_what_the_adapter_gets(tmp_path, name):
    from shoal.config.load import validate
    from shoal.tasks.choose import open_task

    resolved = read(name).resolve()
    data = networks.write_data(resolved, 2, tmp_path)
    values = {"model": {"network": name}, "data": {"datasets": [str(data)]}}
    task = open_task(validate(values | {"train": {"seq_len": 32} if resolved.is_tokens else {}}, "test"))
    assert task.num_parameters == resolved.num_parameters


def test_default_settings_of_all_networks_come_first_and_each_row_is_kept(tmp_path, monkeypatch):
    def measured(options, rows, keep):
        cell = Cell(options.networks[0], "pytorch", options.modes[0], options.batch_sizes[0], 1)
        keep(Row(cell, "done", samples=[1.0]))

    monkeypatch.setattr(networks, "measure", measured)
    kept = []
    wish = argparse.Namespace(
        steps=1, warmup=1, device="cuda", batch=0, limit_s=60.0, networks=["fcn-s", "fcn-r"]
    )
    assert networks.gpu(wish, kept.append)
    assert [len(figures["rows"]) for figures in kept] == [1, 2, 3, 4, 4]
    asked = [(row["cell"]["network"], row["cell"]["mode"], row["cell"]["batch"]) for row in kept[-1]["rows"]]
    assert asked[:3] == [("fcn-s", "default", 64), ("fcn-r", "default", 1024), ("fcn-s", "tuned", 64)]
    wish.limit_s = -1.0
    assert not networks.gpu(wish, kept.append)
