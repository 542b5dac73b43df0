"""Every layout against every other."""

import time

import pytest

from benchmarks.record import write_record
from tests.tiny_dataset import random_dataset
from tests.train.test_reshard import STYLES, check_matrix

LAYOUTS = (
    "1",
    "dp2",
    "zero1x2",
    "zero2x2",
    "zero3x2",
    "tp2",
    "tp4",
    "pp2",
    "dp2*tp2",
    "pp2*tp2",
    "dp2*zero3x2",
)

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]


def test_every_checkpoint_loads_under_every_layout(pool, tmp_path):
    data = random_dataset(tmp_path / "walk")
    seconds = {}
    for style in STYLES:
        began = time.monotonic()
        check_matrix(pool, data, tmp_path / style, LAYOUTS, style)
        seconds[style] = round(time.monotonic() - began, 1)
    write_record(
        "reshard_matrix",
        {
            "claim": "every weight and moment bit-equal after load; next step's loss to 2e-6",
            "layouts": LAYOUTS,
            "loads_a_style": len(LAYOUTS) ** 2,
            "seconds": seconds,
        },
    )
