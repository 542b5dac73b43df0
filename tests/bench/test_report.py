"""`shoal bench report`: sentences that follow from the record, a page that a browser shows, bad records."""

import base64
import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from shoal.bench import sections
from shoal.bench.read_records import SCHEMAS, load
from shoal.bench.report import as_csv, command, page
from shoal.bench.sections import SECTIONS, Picture, Table, answer, fastest
from shoal.errors import InputError
from tests.bench import made_up
from tests.bench.made_up import gradsync_cell, network_row, samples
from tests.cases import every
from tests.commands import run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def read(tmp_path):
    """Return a function that writes and loads a record."""
    return lambda record: load(made_up.write(tmp_path, record=record)[0])


@pytest.fixture
def told(read, monkeypatch):
    """Return a function that gives the sentences and tables of a record, whose pictures are not drawn."""
    monkeypatch.setattr(sections.pictures, "lines", lambda *_, **__: "")
    monkeypatch.setattr(sections, "bars", lambda *_, **__: "")

    def tell(record):
        blocks = list(SECTIONS[record["name"]](read(record)))
        words = [block.sentence for block in blocks if isinstance(block, Picture)]
        return words, {block.title: block for block in blocks if isinstance(block, Table)}

    return tell


def test_every_kind_of_record_has_a_section():
    assert SCHEMAS.keys() == SECTIONS.keys()


def test_networks_are_told_with_the_fastest_the_knee_and_the_agreement_of_losses(told):
    sentences, tables = told(made_up.networks())
    assert len(sentences) == 6
    assert re.fullmatch(
        r"jax tuned is the fastest for fcn-r with batch size 512: 1\.\d+ times the speed of pytorch .*\.",
        sentences[0],
    )
    assert sentences[1] == (
        "Fewest threads within 5 % of the best for fcn-r: pytorch default 4, pytorch tuned 4 and jax tuned 4."
    )
    assert sentences[2].startswith(
        "The losses of fcn-r in 3 frameworks and modes agree to 6.0e-05 of their value over 25"
    )
    seconds = tables["Seconds a mini-batch"]
    assert seconds.headings == ["network", "batch", "threads", "workers", *made_up.SPEED]
    assert seconds.rows[0][:4] == ["fcn-r", "32", "1", "1"]
    assert [cell.startswith("*") for cell in seconds.rows[0][4:]] == [False, False, True]
    assert tables["Rows without a result"].rows == [
        ["fcn-r mxnet default batch 128, 4 threads", "failed", "mxnet is not installed"],
        ["fcn-r jax default batch 128, 4 threads", "rejected", "loss 3 on the same weights, pytorch has 2"],
    ]
    memory = tables["Memory, clock and power"]
    assert memory.headings == ["row", "samples/s", "peak MB", "lowest MHz", "W", "samples/s per W"]
    assert memory.rows[0][2:5] == ["512", "2,500", "65"]


def test_columns_that_no_row_has_are_left_out(told):
    rows = [network_row(sensors={}), network_row(batch=32, sensors={})]
    assert told(made_up.networks(rows))[1]["Memory, clock and power"].headings == [
        "row",
        "samples/s",
        "peak MB",
    ]
    rows = [network_row(sensors={}, peak_bytes=0)]
    assert "Memory, clock and power" not in told(made_up.networks(rows))[1]


def test_times_that_overlap_are_not_called_different(read):
    rows = [
        network_row(label="jax tuned", samples=samples(1.0, seed=1)),
        network_row(samples=samples(1.01, seed=2)),
    ]
    found = read(made_up.networks(rows)).rows
    assert (
        fastest(found, "x")
        == "No clear difference between jax tuned and pytorch default for x: p5 to p95 overlap."
    )
    assert "no clear difference to pytorch default (fcn-r)" in answer(found)
    rows[0]["samples"] = samples(0.7)
    found = read(made_up.networks(rows)).rows
    assert fastest(found, "x") == "jax tuned is the fastest for x: 1.44 times the speed of pytorch default."


def test_the_answer_names_framework_threads_and_batch_over_all_networks(read):
    assert answer(read(made_up.networks()).rows) == (
        "Here: jax tuned, 4 threads, batch size 512: 1.41 times the samples/s of pytorch default "
        "(fcn-r and resnet-56)."
    )
    alone = [network_row(threads=t, batch=b) for t in (1, 2) for b in (32, 128)]
    alone.append(network_row("lstm", threads=1, batch=32))  # batch 128 has no row of it
    assert (
        answer(read(made_up.networks(alone)).rows)
        == "Here: pytorch default, 1 thread, batch size 32 (fcn-r and lstm)."
    )
    assert answer([]) == ""


def test_strategies_are_told_with_time_bytes_speed_up_and_loss(told):
    sentences, tables = told(made_up.gradsync())
    where = "fcn-r, batch size 128, link 1gbit"
    assert sentences == [
        "The least time: onebit with 4 workers, 6 times the speed of one worker.",
        f"onebit is the fastest for {where}, 4 workers: 1.8 times the speed of allreduce. "
        "onebit sends 25.9 times fewer bytes than allreduce.",
        "After 40 steps, onebit has the lowest loss: 1.398.",
        "After 2 s, onebit has the lowest loss: 1.398.",
    ]
    table = tables[f"Seconds a mini-batch: {where}"]
    assert table.headings == ["strategy", "1", "2", "4", "speed-up", "MB/step", "waiting"]
    assert [row[0] for row in table.rows] == ["one worker", "allreduce", "onebit", "diloco:every=20"]
    assert table.rows[2][3].startswith("0.05\n")
    assert table.rows[2][4:] == ["6.00", "2.2", "30%"]
    assert table.rows[1][5] == "~57"  # by formula
    assert tables["Rows without a result"].rows[0][1:] == ["refused", "sync.block is not read"]


def test_the_loss_by_second_is_that_when_the_fastest_is_done(told):
    slow = [{"step": step, "seconds": step * 1.0, "loss": 3.0 - 0.05 * step} for step in (0, 20, 40)]
    fast = [{"step": step, "seconds": step * 0.5, "loss": 3.0 - 0.03 * step} for step in (0, 20, 40)]
    cells = [gradsync_cell(curve=slow, seconds=1.0), gradsync_cell("onebit", curve=fast, seconds=0.5)]
    sentences, _ = told({**made_up.gradsync(), "cells": cells})
    assert sentences[1:] == [
        "After 40 steps, allreduce has the lowest loss: 1.",
        "After 20 s, onebit has the lowest loss: 1.8.",
    ]


def test_losses_that_are_close_or_diverge_are_told_so(told):
    near = [{"step": 40, "seconds": 8.0, "loss": 2.001}]
    lost = [{"step": 40, "seconds": 8.0, "loss": float("nan")}]
    cells = [gradsync_cell(curve=[{"step": 40, "seconds": 8.0, "loss": 2.0}])]
    cells += [gradsync_cell("onebit", curve=near), gradsync_cell("async_sgd", curve=lost)]
    sentences, _ = told({**made_up.gradsync(), "cells": cells})
    assert sentences[1] == "After 40 steps, the lowest losses are less than 1 % apart: allreduce and onebit."


def test_a_strategy_no_faster_than_one_worker_is_told_so(told):
    cells = [
        gradsync_cell(workers=1, link="local"),
        gradsync_cell(workers=2),
        gradsync_cell(workers=4, seconds=0.3),
    ]
    sentences, _ = told({**made_up.gradsync(), "cells": cells})
    assert sentences[0] == (
        "No strategy is clearly faster than one worker. "
        "The least time: allreduce with 2 workers, 0.998 times the speed of one worker."
    )


def test_collectives_are_told_with_the_back_end_s_speed_and_wrong_sums(told):
    record = made_up.collectives()
    sentences, tables = told(record)
    assert sentences == [
        "chunked_ring is the fastest for 256 MB on 2 ranks: 2 GB/s, 1.33 times the speed of backend."
    ]
    assert tables["Milliseconds an all-reduce"].rows[0][:2] == ["1 KB", "0.101"]
    assert tables["Milliseconds an all-reduce"].note.endswith("ring 100 us, 1 GB/s")
    record["rows"][-1] |= {"time_s": record["rows"][-2]["time_s"] * 1.05, "wrong": 3}
    assert told(record)[0] == [
        "Wrong sums by backend. Less than 10 % apart, no clear difference for 256 MB on 2 ranks: "
        "chunked_ring and backend."
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    hostile = "$\\frac{$<script>console.error(1)</script>{{7*7}}" + "x" * 150
    records = {"n": made_up.networks(), "g": made_up.gradsync(), "c": made_up.collectives()}
    records["n"]["rows"].append(network_row(hostile, f"{hostile} tuned", versions={hostile: hostile}))
    records["n"]["rows"].append(network_row(label="jax tuned", batch=64, status="failed", reason=hostile * 3))
    output = folder / "report.html"
    assert command(made_up.write(folder, **records), output, folder / "rows.csv") == 0
    return output


def test_the_page_has_no_part_elsewhere_and_names_are_escaped(whole):
    text = whole.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    pictures = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert len(pictures) == 12
    assert all(b"<script" not in base64.b64decode(one) for one in pictures)
    for fact in (
        "9af360d00000",
        "2026-11-24",
        "CPU (made up)",
        "python 3.11.7",
        "before 0.10, after 1.50",
        "steps 20",
    ):
        assert fact in text


@pytest.mark.parametrize("width", every(2, [360, 1280]))
def test_a_browser_shows_it_without_overflow_errors_or_missing_pictures(whole, width):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the report was not opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, words = browser.new_page(viewport={"width": width, "height": 800}), []
        page.on("console", lambda message: words.append(message.text))
        page.on("pageerror", lambda error: words.append(str(error)))
        page.goto(whole.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        loaded = page.evaluate("[...document.images].map(one => one.complete && one.naturalWidth > 100)")
        assert (len(loaded), all(loaded)) == (12, True)
        inner = page.evaluate(
            "[...document.querySelectorAll('.box')].some(one => one.scrollWidth > one.clientWidth)"
        )
        assert inner or width > 360  # a wide table scrolls in its box
        assert words == []
        browser.close()


def test_the_same_records_give_the_same_page(read):
    record = read(made_up.gradsync())
    assert page([record]) == page([record])


def test_csv_has_a_line_a_row_and_no_formulas(read):
    record = made_up.networks(
        [network_row("=1+1", samples=[1.0, 2.0, 3.0]), network_row(status="failed", samples=[])]
    )
    lines = list(csv.DictReader(io.StringIO(as_csv([read(record), read(made_up.collectives())]))))
    assert len(lines) == 14
    assert lines[0]["cell.network"] == "'=1+1"
    assert (lines[0]["median_s"], lines[0]["num_samples"], lines[0]["peak_bytes"]) == (
        "2.0",
        "3",
        "512000000",
    )
    assert (lines[1]["status"], lines[1]["median_s"]) == ("failed", "")
    assert (lines[2]["kind"], lines[2]["algorithm"], lines[2]["size"]) == ("collectives", "ring", "1024")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(name="systems"), "name = 'systems' is not that of a record"),
        (lambda r: r.update(rows=7), "rows = 7: input should be a valid list"),
        (lambda r: r["rows"][1]["cell"].pop("threads"), "rows.1.cell.threads: "),
        (lambda r: r["rows"][1]["cell"].update(batch=0), "rows.1: .*batch and threads must be above 0"),
        (lambda r: r["rows"][1].update(status="odd"), "rows.1.status = 'odd': input should be 'done'"),
        (
            lambda r: r["rows"][1].update(samples=["fast"]),
            "rows.1.samples.0 = 'fast': input should be a valid number",
        ),
        (
            lambda r: r["rows"][1].update(samples=[float("nan")]),
            "rows.1.samples.0 = nan: too large, or no number",
        ),
        (lambda r: r["rows"][1].update(samples=[1.0, 0.0]), "fcn-r pytorch .* is done, and has no samples"),
        (lambda r: r["rows"][1].update(samples=[]), "is done, and has no samples"),
        (
            lambda r: r["rows"][1].update(reason="x" * 20_001),
            "rows.1.reason: 20,001 characters, 20,000 are allowed",
        ),
        (lambda r: r["rows"][1].update(samples=[1.0] * 100_001), "rows.1.samples: 100,001 values"),
        (lambda r: r["rows"][1].update(peak_bytes=10**400), "rows.1.peak_bytes = 1000"),
        (lambda r: r.update(options={"a": [[[[[[[[[1]]]]]]]]]}), "options.a.0.0.0.*: 1 values, 9 deep"),
        (lambda r: r.update(rows=r["rows"][:1] * 2_001), "2,001 rows of 1 networks"),
        (lambda r: r.update(rows=[network_row(f"n{n}") for n in range(25)]), "25 rows of 25 networks"),
        (lambda r: r.update(machine=[1]), "machine = .*: input should be a valid dictionary"),
        (
            lambda r: r.update(versions={"torch": None}),
            "versions.torch = None: input should be a valid string",
        ),
    ],
)
def test_a_record_that_does_not_follow_the_schema_is_refused_with_file_and_field(tmp_path, change, message):
    record = made_up.networks([network_row(), network_row()])
    change(record)
    (path,) = made_up.write(tmp_path, record=record)
    with pytest.raises(InputError, match=message) as error:
        load(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"name": 3}', "\xff", "[" * 5000])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "record.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"record\.json"):
        load(tmp_path / "record.json")


def test_a_report_needs_records_a_file_to_write_and_its_packages(tmp_path, monkeypatch):
    (path,) = made_up.write(tmp_path, n=made_up.networks())
    for records, output in (([], tmp_path / "r.html"), ([path], None), ([path] * 21, tmp_path / "r.html")):
        with pytest.raises(InputError, match="records, --output"):
            command(records, output, None)
    with pytest.raises(InputError, match="there is no such folder"):
        command([path], tmp_path / "none/r.html", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="a report needs matplotlib and jinja2"):
        command([path], tmp_path / "r.html", None)


def test_records_that_are_committed_are_still_read():
    folder = Path(__file__).parents[2] / "benchmarks/records"
    record = load(folder / "gradsync_grid.json")
    assert len(record.timed) == 63
    names = json.loads((folder / "gradsync_grid.json").read_text())["cells"]
    assert record.timed[0].spread.median == pytest.approx(names[0]["seconds_a_step"])


def test_the_commands_are_there_and_errors_are_sentences(tmp_path):
    a, b = made_up.write(
        tmp_path, a=made_up.networks(), b=made_up.networks([network_row(samples=samples(9.0))])
    )
    done = run("bench", "report", a, "--csv", tmp_path / "rows.csv")
    assert (done.returncode, len((tmp_path / "rows.csv").read_text().splitlines())) == (0, 75)
    assert run("bench", "compare", a, b, "--fail-above", "1.05").returncode == 1
    b.write_text("{}")
    done = run("bench", "compare", a, b)
    assert done.returncode == 2
    assert f"error: record {b}: name = None is not that of a record" in done.stderr
    done = run("bench", "all", "--output", tmp_path / "tour", "--minutes", "0")
    assert (done.returncode, "--minutes 0 is too short" in done.stderr) == (2, True)
