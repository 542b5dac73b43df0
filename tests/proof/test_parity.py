"""What `shoal parity` says of every kind of layout, in both decoder styles, and how long it takes."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.record import write_record
from tests.proof.layouts import ALL

SIX = "dp2, zero3x2, tp2+sp, pp2, dp2*tp2, pp2*dp2"
STYLES = {"gpt2": ["tiny"], "llama": ["tiny-llama", "--model.n_kv_heads=4"]}

pytestmark = [pytest.mark.proof, pytest.mark.alone, pytest.mark.timeout(2400)]


def parity(style, layouts, dropout, file, *settings):
    """Run the command; return its report and seconds."""
    command = [sys.executable, "-m", "shoal", "parity", *STYLES[style], "--layouts", layouts, "--json", file]
    command += [f"--model.dropout={dropout}", f"--model.attention_dropout={dropout}", *settings]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), seconds


def largest(report, kind):
    """Return the largest relative difference of a kind that is not below its own floor."""
    apart = report["below_floor"]
    findings = [finding for row in report["layouts"] for finding in row["findings"]]
    return max(float(f["difference"]) for f in findings if f["kind"] == kind and f["name"] not in apart)


def test_six_layouts_take_under_three_minutes(tmp_path):
    runs = []
    for style in STYLES:
        report, seconds = parity(style, SIX, 0.1, tmp_path / "parity.json")
        kinds = ("loss", "norm", "validation", "gradient", "weight")
        runs.append(
            {
                "style": style,
                "dropout": 0.1,
                "seconds": round(seconds, 1),
                "seconds_of": {row["layout"]: row["seconds"] for row in report["layouts"]},
                "largest_difference": {kind: largest(report, kind) for kind in kinds},
                "floors": report["floors"],
            }
        )
    write_record("parity", {"claim": "six layouts in under 3 minutes on 2 cores", "runs": runs})
    assert max(run["seconds"] for run in runs) < 180


def test_every_layout_is_one_process_up_to_rounding(tmp_path):
    """Losses and norms to 2e-6, gradients of step 1 to 1e-5 of each tensor's norm: no floor is needed.

    Each layout is tried in both styles, in one of them with dropout and micro-batches of two.
    """
    limits = {"loss": 2e-6, "norm": 2e-6, "gradient": 1e-5}
    names, runs = ALL.split(", "), []
    for style, dropout, micro, first in (
        ("gpt2", 0.0, 1, 0), ("gpt2", 0.1, 2, 1), ("llama", 0.0, 1, 1), ("llama", 0.1, 2, 0),
    ):  # fmt: skip
        file, layouts = tmp_path / "parity.json", names[first::2]
        size = f"--train.micro_batch_size={micro}"
        report, seconds = parity(style, ", ".join(layouts), dropout, file, size)
        assert len(report["layouts"]) == len(layouts) == 10
        found = {kind: largest(report, kind) for kind in limits}
        made = {"style": style, "dropout": dropout, "layouts": layouts, "seconds": round(seconds, 1)}
        runs.append(made | {"largest": found})
        for kind, limit in limits.items():
            assert found[kind] < limit, (style, dropout, kind)
    claim = f"relative differences from one process below {limits}"
    write_record("parity_matrix", {"claim": claim, "layouts": names, "runs": runs})
