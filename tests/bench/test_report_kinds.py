"""Sections of the report on convergence, layouts and the machine, from what their benchmarks write."""

from dataclasses import asdict

import pytest

from shoal.bench.ceilings import Ceiling
from shoal.bench.cells import Cell, CellResult, Network, parse_way
from shoal.bench.layouts import Column
from shoal.bench.measured import measured
from shoal.bench.products import Way
from shoal.bench.read_records import load
from shoal.bench.report import as_csv, page
from shoal.bench.sections import SECTIONS, Picture, Table, shares
from shoal.errors import InputError
from shoal.runtime.files import write_json
from shoal.train.clock import PHASES
from tests.bench import made_up


@pytest.fixture
def read(tmp_path):
    """Return a function that writes rows as a record, and reads it."""

    def written(name, **content):
        write_json(tmp_path / f"{name}.json", {"name": name, **made_up.HEAD, **content})
        return load(tmp_path / f"{name}.json")

    return written


def told(record):
    blocks = list(SECTIONS[record.kind](record))
    words = [block.sentence for block in blocks if isinstance(block, Picture)]
    return words, {block.title: block for block in blocks if isinstance(block, Table)}


def training(seed, workers, accuracies):
    network = Network(f"net seed {seed}", "fcn-r", "data", 8)
    lines = [{"step": n, "loss": 4.0 - n, "seconds": 1 / workers, "communication_s": 0.0} for n in (1, 2)]
    lines += [
        {"step": step, "validation_loss": 1.0, "validation_accuracy": value}
        for step, value in enumerate(accuracies, 1)
    ]
    way = parse_way("allreduce", 4)
    return CellResult(
        Cell(network, way, workers, "local", 4), "done", measured(lines, steps_per_epoch=1.0)
    ).as_record()


def test_convergence_is_told_by_epoch_and_by_second_with_the_seeds(read):
    cells = [training(1, 1, [0.5, 0.8]), training(2, 1, [0.5, 0.9]), training(1, 2, [0.5, 0.7])]
    cells.append({**cells[0], "network": "net seed 3", "status": "failed", "reason": "no memory"})
    words, tables = told(read("convergence", cells=cells))
    assert words == [
        "Training loss of net: 2 (2 to 2) with 1 worker at epoch 2.0 "
        "and 2 (2 to 2) with 2 workers at epoch 2.0.",
        "Accuracy of net: 0.85 (0.8 to 0.9) with 1 worker at epoch 2.0 "
        "and 0.7 (0.7 to 0.7) with 2 workers at epoch 2.0.",
        "Accuracy of net: 0.85 (0.8 to 0.9) with 1 worker at 2 s and 0.7 (0.7 to 0.7) with 2 workers at 1 s.",
    ]
    assert tables["Rows without a result"].rows == [["net seed 3, 1 worker", "failed", "no memory"]]


def test_layouts_stand_side_by_side(read):
    def column(layout, seconds):
        phases = {name: [seconds / 10] * 4 for name in PHASES}
        found = {"validation_loss": 2.0, "validation_perplexity": 7.389}
        return asdict(
            Column(layout, "done", "", 100, 2_000_000, 3_000_000, [seconds] * 4, phases, [5.0, 4.0], found)
        )

    refused = asdict(Column("tp3", "refused", "2 heads"))
    asked = {"unit": "tokens", "steps": 2, "per_step": 100}
    rows = [column("1", 0.2), column("dp2", 0.1), refused]
    words, tables = told(read("layouts", rows=rows, options=asked))
    assert words == ["dp2 has the shortest mean step: 100 ms."]
    table = tables["Layouts side by side"]
    assert table.headings == ["", "1", "dp2"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["ms a step"] == ["200.0", "100.0"]
    assert rows["tokens/s"] == ["500", "1,000"]
    assert rows["speed (1 = 1)"] == ["1.00", "2.00"]
    assert rows["loss, step 2"] == ["4.0000", "4.0000"]
    assert rows["validation perplexity"] == ["7.389", "7.389"]
    assert tables["Rows without a result"].rows == [["tp3", "refused", "2 heads"]]


def test_rates_products_and_the_shares_of_a_network(read):
    matmul = Ceiling("matmul", "cpu", "fp32", 4, 1024, rate=2e11, samples=[0.01])
    link = Ceiling("link", "cpu", "loopback", 0, 1 << 24, rate=1e9, latency_s=0.0, samples=[0.01])
    machine = read("ceilings", rows=[asdict(matmul), asdict(link)])
    _, tables = told(machine)
    assert [row[-1] for row in tables["Rates of this machine"].rows] == ["200", "1"]
    ways = [Way("A B", "plain", 2e9, samples=[0.02]), Way("A B", "copy", 2e9, samples=[0.01])]
    ways.append(Way("A B", "wrong", 2e9, reason="differs"))
    products = read("products", rows=[asdict(way) for way in ways])
    words, tables = told(products)
    assert words == ["copy takes the least time for A B: 10 ms, plain 2 times as long."]
    assert tables["Ways without a result"].rows == [["A B", "wrong", "differs"]]
    row = made_up.network_row(parameters=25_000_000, multiply_adds=1_000_000, samples=[0.1] * 5)
    networks = read("networks", rows=[row])
    (table,) = shares(networks, machine)
    # 2 x 3 x 1e6 x 128 samples in 0.1 s of 2e11 a second; a ring of two sends 100 MB once.
    assert table.rows[0][1:] == ["4%", "100", "100", "100"]
    text = page([networks, machine, products])
    assert "Share of what this machine can do" in text
    assert as_csv([machine, products]).count("\n") == 1 + 2 + 3


DONE = asdict(Column("dp2", "done", seconds=[0.1], phases_s={name: [0.01] for name in PHASES}, losses=[4.0]))
ASKED = {"options": {"unit": "tokens", "steps": 2, "per_step": 100}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("layouts", {"rows": [DONE]}, "options need unit"),
        ("layouts", {"rows": [DONE | {"layout": "dp0"}], **ASKED}, "dp0"),
        ("layouts", {"rows": [DONE | {"phases_s": {}}], **ASKED}, "as many times of each phase"),
        ("layouts", {"rows": [DONE | {"seconds": [0.0]}], **ASKED}, "seconds above 0"),
        ("convergence", {"cells": [training(1, 1, [0.5]) | {"losses": []}]}, "the losses of its steps"),
        ("convergence", {"cells": [training(1, 1, [0.5]) | {"curve": []}]}, "needs a curve"),
        ("products", {"rows": [asdict(Way("A", "b", 1.0)) | {"samples": [0.0]}]}, "above 0"),
        ("ceilings", {"rows": [{"what": "matmul"}]}, "rows.0.device"),
    ],
)
def test_a_record_that_cannot_be_is_rejected_with_the_file(read, name, content, said):
    with pytest.raises(InputError, match=f"record .*{name}.json: .*{said}"):
        read(name, **content)


def test_runs_that_diverged_are_not_drawn(read):
    diverged = training(1, 1, [0.5, 0.6]) | {"losses": [float("inf"), float("nan")]}
    words, _ = told(read("convergence", cells=[diverged]))
    assert [sentence.split()[0] for sentence in words] == ["Accuracy", "Accuracy"]


def test_a_record_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no record .*none\.json") as caught:
        load(tmp_path / "none.json")
    assert "--output FILE" in caught.value.hint
