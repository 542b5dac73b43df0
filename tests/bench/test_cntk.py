"""CNTK's adapter on a stand-in for the package, and what an old Python needs of the files that it runs."""

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.bench import environments, networks
from shoal.bench.frameworks import with_pytorch
from shoal.bench.networks import Cell, NetworksOptions, measure, write_inputs
from shoal.bench.samples import random_samples
from shoal.networks.description import parse
from tests.bench import cntk_stand_in
from tests.bench.every_kind import ALL

LSTM = """
tokens = 5
classes = 11
[[layers]]
kind = "embedding"
out = 6
[[layers]]
kind = "lstm"
out = 4
layers = 2
[[layers]]
kind = "linear"
out = "classes"
"""


@pytest.fixture
def with_cntk(monkeypatch):
    monkeypatch.setitem(sys.modules, "cntk", cntk_stand_in)
    yield importlib.import_module("shoal.bench.frameworks.with_cntk")
    del sys.modules["shoal.bench.frameworks.with_cntk"]


@pytest.fixture
def job_of(tmp_path):
    """A function from a description to a job, its weights and its batches."""

    def made(text, mode="default"):
        resolved = parse(text, "net").resolve()
        files = write_inputs(resolved, random_samples(resolved, 4), tmp_path)
        weights, data = (dict(np.load(files[name])) for name in ("weights", "data"))
        job = networks._job(resolved, Cell("net", "cntk", mode, 4, 1), NetworksOptions(()))
        batches = [(data["inputs"][at : at + 4], data["targets"][at : at + 4]) for at in range(0, 16, 4)]
        return job, weights, batches

    return made


@pytest.mark.parametrize("text", [ALL, LSTM], ids=["every kind", "lstm"])
@pytest.mark.parametrize("mode", ["default", "tuned"])
def test_cntk_trains_as_pytorch_does(with_cntk, job_of, text, mode):
    job, weights, batches = job_of(text, mode)
    ours, theirs = with_cntk.Adapter(job, weights), with_pytorch.Adapter({**job, "mode": "default"}, weights)
    assert ours.num_parameters() == theirs.num_parameters()
    given, expected = ([one.put(*batch) for batch in batches] for one in (ours, theirs))
    assert ours.identity(given[0]) == pytest.approx(theirs.identity(expected[0]), rel=1e-5)
    losses = [[one.read(one.step(b)) for b in (*bs, *bs)] for one, bs in ((ours, given), (theirs, expected))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert ours.versions()["cntk"] == "2.7"
    assert cntk_stand_in.threads[-1] == 1


def test_tuned_makes_values_of_samples_once(with_cntk, job_of):
    for mode, kind in (("default", np.ndarray), ("tuned", cntk_stand_in.Value)):
        job, weights, batches = job_of(ALL, mode)
        assert {type(held) for held in with_cntk.Adapter(job, weights).put(*batches[0]).values()} == {kind}


def test_what_cntk_computes_otherwise_is_refused(with_cntk, job_of, monkeypatch):
    with pytest.raises(NotImplementedError, match="CNTK pads averages by a rule of its own"):
        with_cntk.Adapter(*job_of(ALL.replace("kernel = 2\n", "kernel = 2\npadding = 1\n"))[:2])
    monkeypatch.setattr(cntk_stand_in, "pooling", lambda x, *_, **__: x)
    with pytest.raises(
        NotImplementedError, match=r"max_pool makes \(4, 11, 11\) of \(4, 9, 9\), the description"
    ):
        with_cntk.Adapter(*job_of(ALL)[:2])


def test_a_row_of_cntk_says_what_is_missing(tmp_path):
    (tmp_path / "net.toml").write_text(LSTM)
    rows, cell = [], Cell(str(tmp_path / "net.toml"), "cntk", "default", 4, 1)
    measure(NetworksOptions((), cells=(cell,)), [], rows.append)
    assert (rows[0].status, rows[0].reason) == ("failed", environments.GIVEN["cntk"])
    with pytest.raises(environments.InputError, match=r"(?s)cntk cannot be installed here.*Python 3\.6"):
        environments.command(("cntk",), ())


@pytest.mark.parametrize("name", ["harness", "with_cntk"])
def test_what_runs_with_cntk_is_python_3_6(name):
    text = (Path(networks.__file__).parent / "frameworks" / f"{name}.py").read_text()
    assert "from __future__" not in text  # annotations came with 3.7
    tree = ast.parse(text, feature_version=(3, 7))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match | ast.NamedExpr)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    evaluated = [node.returns for node in functions]
    evaluated += [
        node.annotation for one in functions for node in ast.walk(one.args) if isinstance(node, ast.arg)
    ]
    evaluated += [node.annotation for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert [ast.unparse(one) for one in evaluated if isinstance(one, ast.Subscript | ast.BinOp)] == []
