"""Published large runs against the planner; docs/published-runs.md has every row."""

import statistics
from pathlib import Path

import pytest

from tests.plan.published import row_of, runs

ROOT = Path(__file__).resolve().parents[2]
RUNS = list(runs())
KINDS = ("v100", "a100", "h100")


def errors(kind):
    return [abs(run.error()) for run in RUNS if run.gpu.startswith(kind)]


def test_there_are_many_rows_of_several_tables():
    assert len(RUNS) >= 20
    assert len({run.table for run in RUNS}) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_constants_of_a_kind_of_gpu_are_fitted_on_two_rows_at_most(kind):
    fitted = [run for run in RUNS if run.gpu.startswith(kind) and run.fitted]
    assert 1 <= len(fitted) <= 2
    devices = {run.gpu: run.workload.cluster.device for run in RUNS if run.gpu.startswith(kind)}
    assert len({(device.product_share, device.memory_share) for device in devices.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_published_runs_are_predicted(kind):
    found = errors(kind)
    assert statistics.fmean(found) < 0.07
    assert max(found) < 0.27


def test_the_page_has_every_row_with_its_error():
    page = (ROOT / "docs" / "published-runs.md").read_text()
    missing = [row_of(run) for run in RUNS if row_of(run) not in page]
    assert not missing
