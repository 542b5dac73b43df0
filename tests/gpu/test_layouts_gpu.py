"""Layouts on CUDA devices give what plain training gives; `make gpu-check PART=layouts` runs these.

One device shows sharding by one rank and its offload; the other layouts need a device for each rank.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.training import make_job, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("group"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_training_is_plain_training(tmp_path, data, zero, offload):
    plain, _, weights = run(tmp_path / "plain", data)
    sharded, _, theirs = run(tmp_path / "zero", data, parallel={"zero": zero, "offload": offload})
    torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(theirs[name].full_tensor(), weight, rtol=1e-4, atol=1e-6)


def test_offloaded_weights_and_moments_lie_in_host_memory(tmp_path, data):
    job = make_job(tmp_path / "run", data, parallel={"zero": 3, "offload": True})
    weights = job.model.named_weights().values()
    assert {weight.device.type for weight in weights} == {"cpu"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layouts_over_two_devices_differ_by_rounding(tmp_path):
    layouts = "dp2, zero2x2, zero3x2, tp2, tp2+sp, pp2"
    command = (sys.executable, "-m", "shoal", "parity", "tiny", "--layouts", layouts)
    done = subprocess.run([*command, "--runtime.device=cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
