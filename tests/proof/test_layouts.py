"""Every layout: its checkpoints under every other, and its curve with every kind of model."""

import time

import pytest

from benchmarks.record import write_record
from shoal.config.layout import parse_layout
from tests.proof.layouts import ALL
from tests.tiny_dataset import random_dataset
from tests.train.layouts import CASES, MODELS, PROOF, check, values_of
from tests.train.ranks import run_training
from tests.train.resharding import STYLES, check_matrix

COMPARED = ALL.split(", ")
THREE_AXES = ("pp2*dp2*tp2", "pp2+interleaved*zero3x2*tp2+sp")  # 8 processes
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

pytestmark = [pytest.mark.proof, pytest.mark.alone, pytest.mark.timeout(1800)]


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


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_trains_as_one_process_does(pool, tmp_path, model, recompute):
    data = random_dataset(tmp_path / "walk")
    one = values_of(data, parse_layout("1"), model)
    (reference,) = pool.run(run_training, 1, tmp_path / "1", one)
    for words in (*(words for words, _, _ in CASES), *PROOF, *THREE_AXES):
        layout = parse_layout(words)
        if recompute == "none" and words in COMPARED:
            continue  # parity goes further: tests/proof/test_parity.py
        if layout.schedule == "zero_bubble" and recompute == "full":
            continue  # refused
        if layout.tp > MODELS[model].get("n_kv_heads", layout.tp):
            continue  # refused, too
        values = values_of(data, layout, model, recompute)
        ranks = pool.run(run_training, layout.world_size, tmp_path / words, values, timeout=300)
        try:
            check(ranks, reference)
        except AssertionError as error:
            raise AssertionError(f"{words}: {error}") from error
