"""Adapters of `shoal bench networks`: the contract with fakes, PyTorch's for real, others where installed."""

import ast
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shoal.bench import environments, networks
from shoal.bench.environments import ENVIRONMENTS, FRAMEWORKS, python_of
from shoal.bench.frameworks import harness
from shoal.bench.networks import Cell, NetworksOptions, Row, judged, measure
from shoal.bench.samples import draw, resolve
from shoal.data.prepare.examples import prepare_examples
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import ConfigError, DataError, InputError
from shoal.networks.description import KINDS, read
from tests.tiny_dataset import random_dataset

ADAPTERS = Path(harness.__file__).parent
OF_A_DECODER = {"attention", "gelu", "layer_norm", "unembedding"}
IMAGES = """
input = [3, 13, 13]
classes = 10
[[layers]]
kind = "conv"
out = 6
kernel = 3
padding = 1
[[layers]]
kind = "max_pool"
kernel = 3
stride = 2
padding = 1
ceil = true
[[layers]]
kind = "residual"
shortcut = [{ kind = "subsample", out = 8, stride = 2 }]
body = [
  { kind = "conv", out = 8, kernel = 3, padding = 1, stride = 2, bias = false }, { kind = "batch_norm" },
  { kind = "relu" },
]
[[layers]]
kind = "residual"
body = [{ kind = "batch_norm" }, { kind = "sigmoid" }]
[[layers]]
kind = "avg_pool"
kernel = 3
stride = 2
padding = 1
ceil = true
[[layers]]
kind = "repeat"
times = 2
body = [{ kind = "conv", out = 8, kernel = 1 }, { kind = "relu" }]
[[layers]]
kind = "flatten"
[[layers]]
kind = "linear"
out = 7
bias = false
[[layers]]
kind = "sigmoid"
[[layers]]
kind = "linear"
out = "classes"
"""
MEANS = """
input = [3, 8, 8]
classes = 4
[[layers]]
kind = "conv"
out = 5
kernel = 3
[[layers]]
kind = "global_avg_pool"
[[layers]]
kind = "linear"
out = "classes"
"""
TOKENS = """
tokens = 6
classes = 11
[[layers]]
kind = "embedding"
out = 5
[[layers]]
kind = "lstm"
out = 4
layers = 2
[[layers]]
kind = "linear"
out = "classes"
"""
NORMED = """
input = [2, 4, 4]
classes = 3
[[layers]]
kind = "conv"
out = 4
kernel = 3
[[layers]]
kind = "batch_norm"
[[layers]]
kind = "flatten"
[[layers]]
kind = "linear"
out = "classes"
gain = 3.0
"""
DENSE = """
input = [1, 8, 8]
classes = 10
[[layers]]
kind = "flatten"
[[layers]]
kind = "linear"
out = 16
[[layers]]
kind = "sigmoid"
[[layers]]
kind = "linear"
out = "classes"
"""


@pytest.fixture
def described(tmp_path):
    """Write descriptions as files, and return what measures them quickly."""

    def write(*texts, **options):
        files = []
        for number, text in enumerate(texts):
            files.append(tmp_path / f"net{number}.toml")
            files[-1].write_text(text)
        few = {"modes": ("default",), "batch_sizes": (4,), "threads": (1,), "steps": 3, "warmup": 1}
        return NetworksOptions(tuple(map(str, files)), **few | options)

    return write


@pytest.fixture
def images(tmp_path):
    """Make a dataset of 8 x 8 images of ten classes, of which training has 40."""
    rng = np.random.default_rng(0)
    labels = np.arange(50) % 10
    inputs = (rng.integers(0, 200, (50, 8, 8)) + 5 * labels[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=inputs, y=labels)
    options = PrepareOptions((str(tmp_path / "images.npz"),), tmp_path / "images", split="8,1,1")
    return prepare_examples(options, Console(quiet=True)).path


def rows_of(options):
    rows = []
    measure(options, [], rows.append)
    return rows


def test_each_adapter_has_every_kind_of_layer_and_the_whole_contract():
    methods = {"versions", "num_parameters", "put", "identity", "step", "wait", "read"}
    for name in FRAMEWORKS:
        if name == "caffe":  # has a test of what it lacks
            continue
        tree = ast.parse((ADAPTERS / f"with_{name}.py").read_text())
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        lacking = {"repeat"} | (set() if name in ("pytorch", "jax") else OF_A_DECODER)
        assert KINDS.keys() - lacking <= words, name
        (adapter,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Adapter")
        own = {node.name for node in adapter.body if isinstance(node, ast.FunctionDef)}
        assert methods | ({"mean"} if name in networks._PROCESSES else set()) <= own, name


def test_what_an_adapter_has_not_is_left_out_with_its_reason(described, tmp_path, monkeypatch):
    """A layer that it lacks, and workers without a mechanism; no failure either."""
    (tmp_path / "harness.py").write_text((ADAPTERS / "harness.py").read_text())
    (tmp_path / "with_pytorch.py").write_text((ADAPTERS / "with_pytorch.py").read_text())
    (tmp_path / "with_jax.py").write_text(
        "class Adapter:\n    def __init__(self, job, weights):\n"
        "        if job['workers'] == 1:\n            raise NotImplementedError('no layer of kind linear')\n"
        "    def num_parameters(self):\n        return 1\n    def versions(self):\n        return {}\n"
    )
    monkeypatch.setattr(networks, "_ADAPTERS", tmp_path)
    options = described(
        DENSE, frameworks=("jax",), workers=(1, 2), threads=(2,), pythons={"jax": sys.executable}
    )
    assert [(row.status, row.reason) for row in rows_of(options)] == [
        ("left out", "no layer of kind linear"),
        ("left out", "this adapter has no data parallelism on a CPU"),
    ]


def test_a_process_gets_its_part_of_each_batch_and_of_the_cores(tmp_path, monkeypatch, capsys):
    (tmp_path / "with_fake.py").write_text("""
class Adapter:
    mechanism = "by hand"
    def __init__(self, job, weights): self.rank = job["rank"]
    def versions(self): return {}
    def num_parameters(self): return 0
    def put(self, inputs, targets): return inputs.tolist(), targets.tolist()
    def identity(self, batch): return float(batch[0][0]), 1.0
    def step(self, batch): return float(batch[1][-1])
    def wait(self): pass
    def read(self, loss): return loss
    def mean(self, losses): return [loss + 100 for loss in losses]
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    cores = []
    monkeypatch.setattr(harness.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(harness.os, "sched_setaffinity", lambda _, cpus: cores.append(len(cpus)))
    np.savez(tmp_path / "weights.npz")
    np.savez(tmp_path / "data.npz", inputs=np.arange(12), targets=np.arange(12))
    job = {"batch": 6, "threads": 4, "workers": 2, "processes": 2, "warmup": 1, "steps": 1}
    job |= {name: str(tmp_path / f"{name}.npz") for name in ("weights", "data")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert harness.main("fake", str(tmp_path / "job.json"), "1") == 0
    built, identity, timed = map(json.loads, capsys.readouterr().out.splitlines())
    assert (built["mechanism"], identity["loss"], timed["losses"]) == ("by hand", 103, [105, 111])
    assert cores == [2]


@pytest.mark.proof
def test_workers_compute_what_one_does_except_for_batch_statistics(described):
    """Without batch statistics the reference is PyTorch's row of one worker, with them its own."""
    options = described(DENSE, NORMED, workers=(1, 2), threads=(2,))
    rows = rows_of(options)
    assert [(row.cell.workers, row.status, row.reason) for row in rows] == [
        (1, "done", ""),
        (2, "done", ""),
    ] * 2
    dense, normed = rows[:2], rows[2:]
    assert dense[1].losses == pytest.approx(dense[0].losses, rel=1e-5)
    assert abs(normed[1].loss / normed[0].loss - 1) > 2e-3  # each worker normalises by its own part
    assert dense[1].mechanism == "DistributedDataParallel over gloo"
    assert not dense[0].mechanism


def test_a_row_that_workers_cannot_share_evenly_is_left_out(described, monkeypatch):
    monkeypatch.setattr(networks, "run_adapter", lambda cell, *_: Row(cell, "failed", "ran"))
    rows = rows_of(described(DENSE, workers=(2, 3), threads=(2, 3)))
    assert [(row.status, row.reason) for row in rows] == [
        ("failed", "ran"),
        ("left out", "3 workers cannot share 4 samples evenly"),
        ("left out", "2 workers cannot share 3 threads evenly"),
        ("left out", "3 workers cannot share 4 samples evenly"),
    ]


def fake_of_jax(folder, monkeypatch, body):
    """Put an adapter in place of JAX's that is PyTorch's with changes."""
    shutil.copytree(ADAPTERS, folder)
    (folder / "with_jax.py").write_text(
        f"from with_pytorch import Adapter as Base\nclass Adapter(Base):\n{body}"
    )
    monkeypatch.setattr(networks, "_ADAPTERS", folder)
    return {"frameworks": ("pytorch", "jax"), "pythons": {"jax": sys.executable}}


def test_a_worker_that_fails_ends_the_row_with_its_reason(described, tmp_path, monkeypatch):
    body = """
    def __init__(self, job, weights):
        assert job["rank"] == 0, "worker 1 fell over"
        import time; time.sleep(600)
"""
    options = fake_of_jax(tmp_path / "fakes", monkeypatch, body)
    monkeypatch.setattr(networks, "_PROCESSES", ("jax",))
    rows = rows_of(described(DENSE, workers=(2,), threads=(2,), **options | {"frameworks": ("jax",)}))
    assert [(row.status, row.reason) for row in rows] == [("failed", "AssertionError: worker 1 fell over")]


@pytest.mark.proof
def test_on_data_a_framework_that_drifts_is_rejected_with_the_first_step(
    described, images, tmp_path, monkeypatch
):
    body = """
    steps = 0
    def step(self, batch):
        self.steps += 1
        if self.steps == 4:
            self.optimiser.param_groups[0]["lr"] = 1.0
        return super().step(batch)
"""
    options = fake_of_jax(tmp_path / "fakes", monkeypatch, body)
    options = described(DENSE, steps=5, **options)
    assert [row.status for row in rows_of(options)] == ["done", "done"]  # random samples: the first step only
    ours, theirs = rows_of(replace(options, data=images))
    assert (ours.status, theirs.status) == ("done", "rejected")
    loss = f"{theirs.losses[4]:.6g}"
    assert theirs.reason == f"loss {loss} in step 5, pytorch has {ours.losses[4]:.6g}"
    assert theirs.losses[:4] == ours.losses[:4]


def test_losses_of_all_steps_are_compared():
    cell = Cell("net", "jax", "default", 4, 1)
    facts = {"parameters": 1, "loss": 1.0, "gradient_norm": 1.0, "samples": [1.0, 1.0], "reads": [0.0, 0.0]}
    facts["total_s"] = 2.0
    curve = Row(cell, "done", **facts, losses=[1.0, 0.5])
    size = type("Size", (), {"num_parameters": 1})
    for losses, reason in (
        ([1.0, 0.5004], ""),
        ([1.0, 0.501], "loss 0.501 in step 2, pytorch has 0.5"),
        ([1.0, float("nan")], "loss nan in step 2, pytorch has 0.5"),
        ([1.0], "1 losses, pytorch has 2"),
    ):
        row = Row(cell, "done", **facts, losses=losses)
        assert judged(row, size, curve, 2, curve=curve).reason == reason


def test_samples_are_those_of_the_dataset_standardised_and_each_step_has_others(described, images):
    (network,) = described(DENSE).networks
    inputs, targets = draw(network, images, 8, 12)  # more than the 40 there are
    assert (inputs.shape, inputs.dtype, targets.shape) == ((96, 1, 8, 8), np.float32, (96,))
    assert abs(inputs[:40].mean()) < 1e-5
    assert inputs[:40].std() == pytest.approx(1, abs=1e-4)
    assert len({batch.tobytes() for batch in np.split(inputs, 12)}) == 12
    again, _ = draw(network, images, 4, 4)
    assert (again == inputs[:16]).all()  # the order does not depend on the batch size
    raw = np.load(images / "train.inputs.npy").reshape(-1, 64).astype(np.float64)
    ours = inputs[0].reshape(64).astype(np.float64)
    fits = [label for x, label in zip(raw, np.load(images / "train.labels.npy"), strict=True)
            if np.corrcoef(x, ours)[0, 1] > 0.999999]  # fmt: skip
    assert fits == [targets[0]]


def test_tokens_are_windows_and_the_vocabulary_is_the_data_s(described, tmp_path):
    (network,) = described(TOKENS).networks
    data = random_dataset(tmp_path / "tokens")
    assert resolve(network, data).classes == 257
    inputs, targets = draw(network, data, 3, 2)
    assert (inputs.shape, inputs.dtype, targets.shape) == ((6, 6), np.int32, (6, 6))
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    with pytest.raises(DataError, match="holds tokens, and this run takes labelled examples"):
        described(DENSE, data=data).check()


def test_a_network_that_cannot_be_measured_is_refused_before_the_first_row(described):
    with pytest.raises(ConfigError, match="neither a network nor a TOML file"):
        replace(described(DENSE), networks=("fcn-r", "alxnet")).check()


def test_a_changed_pin_installs_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", lambda folder, with_pip: folder.mkdir())
    ran = []
    done = type("Done", (), {"returncode": 0})
    monkeypatch.setattr(environments.subprocess, "run", lambda words, **_: ran.append(words) or done)
    environments.command(("jax",), ())
    assert python_of("jax", {})
    monkeypatch.setitem(ENVIRONMENTS, "jax", replace(ENVIRONMENTS["jax"], packages=("jax==0.0.1",)))
    assert python_of("jax", {}) is None
    environments.command(("jax",), ())
    assert [words[-1] for words in ran][1:] == ["jax==0.0.1"]
    assert python_of("jax", {})


def test_a_framework_without_packages_for_this_python_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = replace(ENVIRONMENTS["mxnet"], newest_python=(3, 10))
    monkeypatch.setitem(ENVIRONMENTS, "mxnet", old)
    with pytest.raises(InputError, match=r"mxnet has no packages for Python 3\.\d+\.\d+, the newest is 3.10"):
        environments.command(("mxnet",), ())


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler, and there is no g++")
@pytest.mark.proof
def test_pytorch_compiled_computes_the_same(described):
    rows = rows_of(described(DENSE, modes=("default", "tuned")))
    assert [(row.cell.mode, row.status, row.reason) for row in rows] == [
        ("default", "done", ""),
        ("tuned", "done", ""),
    ]
    assert rows[1].losses == pytest.approx(rows[0].losses, rel=1e-4)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler, and there is no g++")
@pytest.mark.proof
def test_pytorch_compiled_has_the_gradients_of_alexnet_s(described):
    """Some schedules of torch.compile lose those of its convolutions: 107 in place of 129."""
    options = replace(
        described(), networks=("alexnet-s",), batch_sizes=(64,), threads=(2,), steps=1, warmup=1
    )
    all_done(rows_of(replace(options, modes=networks.MODES)))


def test_the_networks_of_these_tests_have_every_kind_of_layer(described):
    kinds = set()
    for network in described(IMAGES, MEANS, TOKENS).networks:
        layers = list(read(network).layers)
        while layers:
            layer = layers.pop()
            kinds.add(layer.kind)
            layers += [*layer.body, *layer.shortcut]
    assert kinds == KINDS.keys() - {"repeat", *OF_A_DECODER}


@pytest.fixture(params=list(ENVIRONMENTS))
def installed(request, monkeypatch):
    """Name a framework that the user has installed; skip where it is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["USERS_CACHE_HOME"])
    if python_of(request.param, {}) is None:
        pytest.skip(f"{request.param} is not installed: shoal bench frameworks --install {request.param}")
    return request.param


def all_done(rows):
    assert [row.reason for row in rows if row.status != "done"] == []


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_each_framework_computes_every_layer_as_pytorch_does(described, installed):
    options = described(IMAGES, MEANS, TOKENS, modes=networks.MODES, workers=(1, 2), threads=(2,))
    rows = rows_of(replace(options, frameworks=("pytorch", installed)))
    all_done(rows)
    assert all(row.mechanism for row in rows if row.cell.workers == 2)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_the_loss_curve_of_fcn_r_is_pytorch_s_for_fifty_steps(described, installed, tmp_path):
    options = PrepareOptions(("sklearn-digits",), tmp_path / "digits")
    data = prepare_examples(options, Console(quiet=True)).path
    few = {"batch_sizes": (32,), "steps": 49, "threads": (2,), "modes": ("default",), "data": data}
    rows = rows_of(replace(described(), networks=("fcn-r",), frameworks=("pytorch", installed), **few))
    all_done(rows)
    assert [len(row.losses) for row in rows] == [50, 50]
    assert rows[1].losses[-1] < rows[1].losses[0]
