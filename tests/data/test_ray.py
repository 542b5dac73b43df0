"""`prepare --runner ray` on a Ray cluster of two nodes on this machine, with one core each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from shoal.data.prepare import engine, run
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, ShoalError
from tests.data import corpus as planted

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def cluster_of(nodes: int) -> Iterator[None]:
    """Run a Ray cluster; RAY_ADDRESS names it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            made.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module", params=[1, 2])
def nodes(request):
    with cluster_of(request.param):
        yield request.param


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return planted.write(tmp_path_factory.mktemp("corpus"))


@pytest.mark.proof
@pytest.mark.parametrize("stages", [True, False])
def test_a_cluster_makes_the_same_dataset(nodes, corpus, tmp_path, stages):
    for name, runner in (("here", "local"), ("there", "ray")):
        chain = corpus / "stages.toml" if stages else None
        made = PrepareOptions(
            (str(corpus / "a.jsonl"),), tmp_path / name, "bytes", split="8,1,1", stages=chain,
            runner=runner, range_bytes=100_000 if runner == "ray" else 300_000,
        )  # fmt: skip
        run.prepare(made, Console(quiet=True))
    assert planted.content(tmp_path / "here") == planted.content(tmp_path / "there")


@pytest.mark.proof
def test_all_nodes_work_and_an_error_is_the_callers(nodes, tmp_path):
    job = engine.Job("tests.data.jobs:Where", {"factor": 3})
    seen, until = set(), time.monotonic() + 60
    while len(seen) < nodes:  # the first tasks may be done before another node has started its worker
        assert time.monotonic() < until
        found = list(engine.Engine(tmp_path, 1, "ray").run(job, [{"value": n} for n in range(8)]))
        assert sorted(one["value"] for one in found) == [3 * n for n in range(8)]
        seen |= {one["node"] for one in found}
    with pytest.raises(DataError, match="a negative value"):
        list(engine.Engine(tmp_path, 1, "ray").run(job, [{"value": -1}]))


def test_no_cluster_is_a_sentence(corpus, tmp_path):
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    arguments = [corpus / "a.jsonl", "--output", tmp_path / "d", "--tokenizer", "bytes", "--runner", "ray"]
    command = [sys.executable, "-m", "shoal", "prepare", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers" in done.stderr
    assert "ray start --head" in done.stderr


def test_usage_reporting_of_ray_is_off_before_its_import(tmp_path, monkeypatch):
    """A stand-in for Ray, first on the path, writes down what it would see."""
    (tmp_path / "ray.py").write_text(
        f"import os\nopen({str(tmp_path / 'seen')!r}, 'w').write(os.environ['RAY_USAGE_STATS_ENABLED'])\n"
        "raise ImportError('not the real one')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ShoalError, match="--runner ray needs Ray") as error:
        list(engine.Engine(tmp_path, 1, "ray").run(engine.Job("a:b", {}), [{}]))
    assert error.value.hint == "pip install 'shoal[ray]'"
    assert (tmp_path / "seen").read_text() == "0"
