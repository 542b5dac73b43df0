"""Caffe's adapter, with a program that reads its files by Caffe's rules and prints what Caffe 1.0 prints."""

import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.bench import environments, networks
from shoal.bench.frameworks import with_caffe, with_pytorch
from shoal.bench.networks import Cell, NetworksOptions, as_json, measure, write_inputs
from shoal.bench.samples import random_samples
from shoal.networks.description import Layer, names, read
from tests.bench.every_kind import ALL


@pytest.fixture
def caffe(tmp_path):
    program = tmp_path / "caffe"
    stand_in = f"{sys.executable} {Path(__file__).parent / 'caffe_stand_in.py'}"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo "caffe version 1.0.0"\nexec {stand_in} "$@"\n'
    )
    program.chmod(0o755)
    return program


def rows_of(tmp_path, text, program, *kinds):
    """Measure cells of Caffe or of other frameworks, given as "caffe tuned"."""
    network = str(tmp_path / "net.toml")
    (tmp_path / "net.toml").write_text(text)
    cells = tuple(Cell(network, *kind.split(), batch=4, threads=1) for kind in kinds or ("caffe default",))
    pythons = {"caffe": str(program)} if program else {}
    rows = []
    measure(NetworksOptions((), steps=3, warmup=1, pythons=pythons, cells=cells), [], rows.append)
    return rows


@pytest.mark.proof
def test_caffe_computes_what_pytorch_does_from_the_files_that_are_written_for_it(tmp_path, caffe):
    kinds = ("caffe default", "caffe tuned", "pytorch default")
    reference, *rows = rows_of(tmp_path, ALL, caffe, *kinds)
    assert reference.status == "done"
    assert [(row.status, row.reason, row.cell.mode) for row in rows] == [
        ("done", "", "default"),
        ("done", "", "tuned"),
    ]
    for row in rows:
        assert row.parameters == read(str(tmp_path / "net.toml")).resolve().num_parameters
        assert row.loss == pytest.approx(reference.loss, rel=1e-5)
        assert row.gradient_norm == pytest.approx(reference.gradient_norm, rel=1e-5)
        assert (len(row.samples), len(row.losses), row.losses[0]) == (3, 4, row.loss)
        assert row.losses == pytest.approx(losses_of_pytorch(tmp_path, row.cell), rel=1e-4)
        assert row.versions["caffe"] == "1.0.0"


def losses_of_pytorch(folder, cell):
    """Train on the first batch in each step, as Caffe does."""
    resolved = read(cell.network).resolve()
    files = write_inputs(resolved, random_samples(resolved, cell.batch), folder)
    weights, data = (dict(np.load(files[name])) for name in ("weights", "data"))
    job = networks._job(resolved, Cell(cell.network, "pytorch", "default", 4, 1), NetworksOptions(()))
    adapter = with_pytorch.Adapter(job, weights)
    batch = adapter.put(data["inputs"][:4], data["targets"][:4])
    return [adapter.read(adapter.step(batch)) for _ in range(4)]


def test_the_time_of_a_step_is_that_of_its_line_also_past_midnight():
    adapter = object.__new__(with_caffe.Adapter)
    stamps = ("23:59:58.000100", "23:59:59.500100", "00:00:00.750100")
    lines = [f"I20261124 {stamp}  9709 solver.cpp:219] Iteration 1, loss = 2" for stamp in stamps]
    adapter.now, adapter.child = 0.0, SimpleNamespace(stderr=iter(["I1124 noise", *lines]))
    times = [(adapter.step(()), adapter.clock())[1] for _ in stamps]
    assert [after - before for before, after in itertools.pairwise(times)] == [1.5, 1.25]


def test_activations_are_in_place_only_if_tuned_and_where_nothing_else_reads_what_they_overwrite():
    relu, conv = {"kind": "relu", "settings": {}}, {"kind": "conv", "before": [1, 4, 4], "after": [1, 4, 4]}
    conv["settings"] = {"bias": False, "kernel": 1, "stride": 1, "padding": 0}
    chain = [conv, {"kind": "residual", "settings": {}, "body": [relu], "shortcut": []}, relu, relu]
    for tuned, expected in ((False, []), (True, ["Eltwise2"])):
        net = with_caffe.Net(in_place=tuned)
        net.chain(chain, iter([np.zeros((1, 1, 1, 1))]), "data")
        layers = [layer.split('"') for layer in net.text.split("layer {")[1:]]
        assert [words[-2] for words in layers if words[-2] == words[-4] and words[3] == "ReLU"] == expected


@pytest.mark.parametrize("name", sorted(set(names()) - {"lstm", "gpt2-s"}))
def test_each_network_is_written_for_caffe_with_all_its_weights(name):
    resolved = read(name).resolve()
    net, shapes = with_caffe.Net(in_place=False), iter(weights_of(resolved.layers))
    net.chain([as_json(layer) for layer in resolved.layers], shapes, "data")
    held = sum(blob.size for layer in net.trained for blob in net.blobs[layer])
    assert (held, next(shapes, None)) == (resolved.num_parameters, None)
    assert net.text.count("round_mode: FLOOR") == (
        name == "resnet-50"
    )  # the only one with pooling that rounds down
    assert ("ceil" in net.text) is False


def weights_of(layers: tuple[Layer, ...]):
    """Yield empty weights in the order of PyTorch's."""
    for layer in layers:
        yield from weights_of(layer.body)
        yield from weights_of(layer.shortcut)
        shape = {
            "linear": layer.before[-1:],
            "conv": (*layer.before[:1], *[layer.settings.get("kernel")] * 2),
        }
        if layer.kind in shape:
            out = layer.after[-1 if layer.kind == "linear" else 0]
            yield np.broadcast_to(0.0, (out, *shape[layer.kind]))
            if layer.settings["bias"]:
                yield np.zeros(out)
        elif layer.kind == "batch_norm":
            yield from (np.zeros(layer.before[0]) for _ in range(2))


@pytest.mark.proof
def test_what_caffe_cannot_compute_costs_its_row_with_the_reason(tmp_path, caffe):
    average = ALL.replace("kernel = 2\n", "kernel = 2\npadding = 1\n")
    assert "Caffe's average counts the padding" in rows_of(tmp_path, average, caffe)[-1].reason
    tokens = 'tokens = 4\nclasses = 5\n[[layers]]\nkind = "embedding"\nout = 3\n'
    tokens += '[[layers]]\nkind = "linear"\nout = "classes"'
    row = rows_of(tmp_path, tokens, caffe)[-1]
    assert (row.status, row.reason) == ("left out", "this adapter has no layer of kind embedding")
    recurrent = tokens.replace("out = 3\n", 'out = 3\n[[layers]]\nkind = "lstm"\nout = 3\n')
    assert "Caffe's LSTM has one bias vector" in rows_of(tmp_path, recurrent, caffe)[-1].reason
    floor = ALL.replace("ceil = true", "ceil = false")
    reason = rows_of(tmp_path, floor, caffe)[-1].reason  # Caffe 1.0 cannot round down
    assert reason.startswith("RuntimeError: caffe train ended with status 134: F1124 ")
    assert reason.endswith('Check failed: no field named "round_mode"')


def test_a_caffe_that_ends_in_the_middle_costs_its_row_with_its_last_words(tmp_path):
    program = tmp_path / "killed"
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 9\n")
    program.chmod(0o755)
    assert (
        rows_of(tmp_path, ALL, program)[-1].reason
        == "RuntimeError: caffe train ended with status 9: out of memory"
    )
    assert with_caffe.last_words("", -9) == "caffe train ended with status -9: it printed nothing"


def test_caffe_ends_with_the_measurement_although_it_has_more_to_do(tmp_path):
    program = tmp_path / "caffe"
    line = "I1124 10:00:00.5 1 solver.cpp:219] Iteration 0, loss = 2"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho '{line}' >&2\nexec sleep 60\n")
    program.chmod(0o755)
    layer = {"kind": "flatten", "settings": {}, "before": [2, 1, 1], "after": [2]}
    job = {"network": {"is_tokens": False, "layers": [layer]}, "weights": f"{tmp_path}/w", "batch": 1}
    job |= {"mode": "default", "program": str(program), "warmup": 1, "steps": 1, "lr": 0.1, "momentum": 0.9}
    code = "import numpy as np, with_caffe as w; batch = np.zeros((1, 2, 1, 1)), np.zeros(1); "
    code += f"w.Adapter({job!r}, {{}}).step(batch)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(with_caffe.__file__).parent, check=True, timeout=50)
    stat, deadline = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat", time.monotonic() + 10
    while stat.exists() and (left := stat.read_text().split()[2] != "Z") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (stat.exists() and left)


def test_a_row_of_caffe_says_that_there_is_no_program(tmp_path, monkeypatch):
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    (missing,) = rows_of(tmp_path, ALL, None)
    assert (missing.status, missing.reason) == ("failed", environments.GIVEN["caffe"])
    monkeypatch.setattr(environments.shutil, "which", lambda name: f"/opt/{name}")
    assert environments.python_of("caffe", {}) == "/opt/caffe"


def test_numbers_and_fields_are_protobufs():
    assert [with_caffe.varint(number) for number in (0, 127, 128, 300)] == [
        b"\0",
        b"\x7f",
        b"\x80\1",
        b"\xac\2",
    ]
    assert with_caffe.field(100, b"a" * 200) == b"\xa2\6\xc8\1" + b"a" * 200
    data = (
        with_caffe.field(1, b"name")
        + b"\x50\x2a"
        + b"\x2d\0\0\0\0"
        + b"\x31"
        + bytes(8)
        + with_caffe.field(7, b"")
    )
    assert [(number, bytes(value)) for number, value in with_caffe.fields(memoryview(data))] == [
        (1, b"name"),
        (7, b""),
    ]


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (
            "I1109 10:34:34.280992  9709 solver.cpp:219] Iteration 360 (0.170469 iter/s, 58.6617s/10 iters), "
            "loss = 0.0140731",
            0.0140731,
        ),
        ("I0907 11:07:00.122465 162 solver.cpp:312] Iteration 0, loss = 16.488", 16.488),
        (
            "I1109 10:34:34.281066  9709 solver.cpp:238]     Train net output #0: loss = 2.1 (* 1 = 2 loss)",
            None,
        ),
        ("I1109 10:34:34.281081  9709 sgd_solver.cpp:105] Iteration 360, lr = 7.8125e-07", None),
    ],
)  # lines that Caffe 1.0 and an older one have printed
def test_the_loss_is_read_from_the_line_of_an_iteration_alone(line, loss):
    found = with_caffe._LOSS.match(line)
    assert (float(found[4]) if found else None) == loss
