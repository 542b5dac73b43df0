"""`shoal bench gradsync`: tables, record and picture of real trainings; what is refused is shown, and why."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks.gradsync import judge_convergence, judge_link, with_earlier
from benchmarks.record import write_record
from shoal.bench import cells
from shoal.bench.cells import Cell, CellResult, Network, parse_way
from shoal.bench.gradsync import (
    NETWORKS,
    GridOptions,
    _hosts,
    make_data,
    measure,
    pareto,
    plan,
    report,
    tables,
    title,
)
from shoal.bench.measured import MeasuredRun, Point
from shoal.config.load import load_config
from shoal.data.dataset import open_dataset
from shoal.data.loader import Windows
from shoal.errors import InputError
from shoal.networks.description import read
from shoal.plan.link_cost import parse_rate
from tests import commands
from tests.tiny_dataset import random_dataset


def test_two_strategies_on_two_processes_and_one_that_is_refused(tmp_path, monkeypatch):
    data, record, picture = random_dataset(tmp_path / "data"), tmp_path / "r.json", tmp_path / "r.png"
    strategies = ("allreduce", "tree_update", "tree_update:block=7")
    words = ("--networks", "gpt", "--workers", 2, "--steps", 6, "--data", data, "--strategies", *strategies)
    words += ("--runs", tmp_path / "runs", "--json", record, "--plot", picture)
    done = commands.run("bench", "gradsync", *words, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "gpt: 2 workers on one host, 16 samples a mini-batch" in done.stdout
    assert "gpt: seconds a mini-batch of 16 on one host" not in done.stdout  # of one number of workers
    assert "refused: sync.block = 7 with sync.strategy = tree_update, which does not read it" in " ".join(
        done.stdout.split()
    )
    told = json.loads(record.read_text())
    assert {"device", "physical_cores"} <= told["machine"].keys()
    assert told["versions"].keys() == {"python", "torch", "shoal"}
    plain, tree, refused = told["cells"]
    assert [cell["status"] for cell in told["cells"]] == ["done", "done", "refused"]
    assert "which does not read it" in refused["reason"]
    assert len(plain["step_s"]) == len(tree["step_s"]) == 6
    assert (plain["counted"], tree["counted"]) == (False, True)
    assert plain["bytes_a_step"] == tree["bytes_a_step"]  # of two ranks, each sends the whole once
    ends = [cell["curve"][-1]["loss"] for cell in (plain, tree)]
    assert ends[0] == pytest.approx(ends[1], rel=2e-6)
    assert ends[0] < plain["curve"][0]["loss"]
    samples = Windows([open_dataset(data).split("train")], 64).total
    assert [point["epoch"] for point in tree["curve"]] == [16 * p["step"] / samples for p in tree["curve"]]
    assert tree["settings"] == {"eval.sequences": "64"}
    assert picture.read_bytes().startswith(b"\x89PNG")

    def nothing_runs(*_):
        raise AssertionError("it is there already")

    monkeypatch.setattr(cells, "_train", nothing_runs)
    ask = GridOptions(strategies[:2], (2,), ("gpt",), ("local",), 6, 0, (data,), tmp_path / "runs")
    again = list(measure(plan(ask, ask.runs), ask.runs))
    assert [list(outcome.found.step_s) for outcome in again] == [plain["step_s"], tree["step_s"]]
    (tmp_path / "runs/gpt-x2-tree_update-local/asked.json").write_text("[]")  # another command made it
    with pytest.raises(AssertionError, match="it is there already"):
        list(measure(plan(ask, ask.runs), ask.runs))


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_training_and_leaves_what_was_measured(tmp_path, number):
    runs, record = tmp_path / "runs", tmp_path / "r.json"
    words = ["--networks", "gpt", "--workers", "1", "2", "--steps", "60", "--strategies", "tree_update"]
    words += ["--data", str(random_dataset(tmp_path / "data")), "--runs", str(runs), "--json", str(record)]
    bench = [sys.executable, "-m", "shoal", "bench", "gradsync"]
    process = subprocess.Popen([*bench, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = runs / "gpt-x2-tree_update-local/ranks/rank-1/pid"
    until = time.monotonic() + 200
    while not pids.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.2)
    worker = int(pids.read_text())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert f"stopped by {number.name}" in stderr
    assert "gpt: 1 worker, 16 samples a mini-batch" in stdout
    assert [cell["status"] for cell in json.loads(record.read_text())["cells"]] == ["done"]
    until = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < until, "a rank goes on"
        time.sleep(0.1)


def cell(word, *, network="gpt", workers=2, link="local", steps=10):
    return Cell(Network(network, "tiny", Path("data"), 16), parse_way(word, steps), workers, link, steps)


def found(seconds, loss, num_bytes=1e6, *, counted=True, start=9.0):
    curve = [Point(0, 0.0, start), Point(10, seconds * 10, loss)]
    return MeasuredRun([seconds] * 10, [seconds / 2] * 10, [num_bytes] * 10, counted, curve, 2)


def shown(outcomes, capsys):
    from rich.console import Console

    for table in tables(outcomes):
        Console(width=110).print(table)
    return capsys.readouterr().out


def test_a_table_compares_with_all_reduce_and_at_the_seconds_of_the_fastest(capsys):
    outcomes = [
        CellResult(cell("allreduce"), "done", found(2.0, 5.0, 8e6, counted=False)),
        CellResult(cell("onebit"), "done", found(1.0, 6.0, 4e5)),
        CellResult(cell("topk"), "refused", reason="not in [sync] here"),
        CellResult(cell("allreduce", workers=4, link="100mbit"), "done", found(3.0, 5.0)),
        CellResult(cell("allreduce", workers=1), "done", found(6.0, 5.0)),
    ]
    text = shown(outcomes, capsys)
    first, second = text.split("gpt: 4 workers on two hosts, 100mbit between them")
    assert "loss, 10 s" in first
    rows = {line.split()[0]: line.split() for line in first.splitlines() if line.strip()}
    assert rows["allreduce"] == ["allreduce", "2.0000", "1.00x", "3.00x", "~8", "50%", "5.0000", "7.0000"]
    assert rows["onebit"] == ["onebit", "1.0000", "2.00x", "6.00x", "0.4", "50%", "6.0000", "6.0000"]
    assert rows["topk"] == ["topk", "refused"]
    assert "topk: refused: not in [sync] here" in first
    assert "~ by the formula" in first
    assert "~" not in second


def test_a_table_of_strategies_by_workers_has_the_seconds_of_a_mini_batch(capsys):
    sizes = ((1, "allreduce", 4.0), (2, "allreduce", 3.0), (2, "onebit", 2.5), (4, "onebit", 1.5))
    outcomes = [CellResult(cell(word, workers=n), "done", found(s, 5.0)) for n, word, s in sizes]
    outcomes.append(CellResult(cell("allreduce", workers=4), "failed", reason="it fell over"))
    *_, last = shown(outcomes, capsys).split("gpt: seconds a mini-batch of 16 on one host")
    rows = [line.split() for line in last.splitlines() if "." in line]
    assert "1 worker" in last
    assert rows == [["allreduce", "4.0000", "3.0000", "failed"], ["onebit", "4.0000", "2.5000", "1.5000"]]


def test_a_network_with_batch_normalisation_names_its_rule(capsys):
    ask = GridOptions((), (2,), ("resnet-56", "alexnet-r"), ("local",), 10, 0, (Path("data"),), None)
    first, *_, other = plan(ask, Path("folder"))
    for one in (first.network, other.network):
        shape, classes = NETWORKS[one.name].made_of[0].split(":")[1:]
        network = read(one.config)
        assert (shape, int(classes)) == ("x".join(map(str, network.input)), network.classes)
        sections = [name.split(".") for name in one.settings]
        load_config(
            one.config, {section: {key: one.settings[f"{section}.{key}"]} for section, key in sections}
        )
    text = shown([CellResult(one, "done", found(2.0, 5.0)) for one in (first, other)], capsys)
    assert "--model.batch_statistics=replica" in first.words()
    assert text.count("batch statistics: replica (model.batch_statistics)") == 1


def test_nothing_beats_what_the_line_joins():
    assert pareto([(3, 1), (1, 5), (2, 6), (2, 4), (4, 1)]) == [(1, 5), (2, 4), (3, 1)]


def test_one_worker_trains_once_and_without_a_link(tmp_path):
    ask = GridOptions(("onebit", "bf16"), (1, 2), ("gpt",), ("local", "1gbit"), 20, 32, (tmp_path,), None)
    planned = plan(ask, tmp_path)
    assert [(c.workers, c.link, c.way.word) for c in planned] == [
        (1, "local", "allreduce"),
        (2, "local", "onebit"),
        (2, "local", "bf16"),
        (2, "1gbit", "onebit"),
        (2, "1gbit", "bf16"),
    ]
    assert all("--train.global_batch_size=32" in c.words() for c in planned)
    assert ["--train.micro_batch_size=32" in c.words() for c in planned] == [True] + [False] * 4


def test_workers_on_two_hosts_of_one_machine_share_its_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(cells, "choose_threads", lambda runtime, workers: (8 // workers, "eight cores"))
    ask = GridOptions(("bf16",), (2, 4), ("gpt",), ("hosts",), 20, 32, (tmp_path,), None)
    threads = [[word for word in cell.words() if "runtime.threads" in word] for cell in plan(ask, tmp_path)]
    assert threads == [["--runtime.threads=4"], ["--runtime.threads=2"]]


def test_settings_that_a_short_run_needs_are_added():
    assert parse_way("diloco:lr=0.5", 20).settings == {"lr": 0.5, "warmup_steps": 2, "every": 5}
    streaming = {"warmup_steps": 4, "every": 10, "fragments": 2, "overlap": 4}
    assert parse_way("streaming_diloco", 40).settings == streaming
    assert parse_way("onebit", 40).warmup_steps == 4
    assert parse_way("diloco:every=50", 1000).period == 50
    assert parse_way("async_sgd:staleness=2", 40).period == 0
    assert parse_way("allreduce:algorithm=ring", 40).settings == {"algorithm": "ring"}


def test_where_no_hosts_can_be_made_a_transport_is_slowed_and_what_has_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.bench.gradsync.why_not", lambda shaped: "this needs root")
    ran = []
    monkeypatch.setattr(
        "shoal.bench.gradsync.run",
        lambda there, *_: ran.append(there) or CellResult(there, "done", found(1.0, 5.0)),
    )
    asked = [cell(word, link="8mbit") for word in ("allreduce", "onebit", "allreduce:algorithm=ring")]
    outcomes = list(measure([*asked, cell("onebit", link="hosts")], tmp_path))
    assert [outcome.status for outcome in outcomes] == ["refused", "done", "done", "refused"]
    assert outcomes[0].reason.startswith("this needs root; delays in the transport would not slow it")
    assert outcomes[3].reason == "this needs root"
    assert all("--runtime.slow_link=8.0" in there.words() for there in ran)
    assert [there.link for there in ran] == ["8mbit", "8mbit"]
    record = report(outcomes, GridOptions((), (2,), ("gpt",), ("8mbit",), 10, 0, (), None))
    assert [cell["delays_in_transport"] for cell in record["cells"]] == [True, True, True, False]
    assert "one host, 8mbit between halves by delays in the transport" in title(outcomes[1].cell)


def test_a_host_cannot_have_half_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.bench.gradsync.why_not", lambda shaped: "")
    monkeypatch.setattr("shoal.bench.gradsync.TwoHosts", MagicMock())
    (outcome,) = measure([cell("onebit", workers=3, link="8mbit")], tmp_path)
    assert outcome.reason == "two hosts need an even number"
    with _hosts("local") as (two, reason):
        assert (two, reason) == (None, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategies", "diloko"), "unknown strategy 'diloko'\n  hint: did you mean 'diloco'?"),
        (("--strategies", "diloco:every"), "--strategies diloco:every: "),
        (("--strategies", "diloco:evry=5"), "did you mean 'every'"),
        (("--strategies", "diloco:every=0"), "--strategies diloco:every=0: sync.every"),
        (("--networks", "resnet"), "unknown network 'resnet'"),
        (("--link", "fast"), "'fast' is not a link rate"),
        (("--steps", "3"), "--steps 3"),
        (("--json", "nowhere/x.json"), "nowhere/x.json: there is no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(words, message):
    from shoal.cli import app as cli

    with pytest.raises(InputError) as error:
        cli.app(["bench", "gradsync", *words], result_action="return_value", exit_on_error=False)
    assert message in str(error.value)


@pytest.mark.proof
def test_data_are_made_once(tmp_path):
    made = make_data(tmp_path, ("random-images", "--limit", "50"))
    before = (made / "manifest.json").stat().st_mtime_ns
    assert make_data(tmp_path, ("random-images", "--limit", "50")) == made
    assert (made / "manifest.json").stat().st_mtime_ns == before


def test_rates_are_bits_a_second():
    assert [parse_rate(words) for words in ("100mbit", "2.5 Gbit", "800kbit")] == [12.5e6, 312.5e6, 1e5]
    for words in ("100", "0mbit", "100MB", "1tbit"):
        with pytest.raises(InputError, match="is not a link rate"):
            parse_rate(words)


def test_a_strategy_is_held_against_all_reduce_on_as_many_workers():
    outcomes = [
        CellResult(cell("allreduce"), "done", found(1.0, 4.0)),
        CellResult(cell("allreduce", workers=4), "done", found(1.0, 5.0)),
        CellResult(cell("onebit"), "done", found(1.0, 4.04)),
        CellResult(cell("onebit", workers=4), "done", found(1.0, 5.06)),
        CellResult(cell("diloco:every=5"), "done", found(1.0, 4.06)),
        CellResult(cell("topk"), "failed", reason="it fell over"),
    ]
    told = {one["what"]: one for one in judge_convergence([one.as_record() for one in outcomes])}
    assert told.pop("loss of onebit x2")["holds"]
    assert told.pop("loss of onebit x4") == {
        "what": "loss of onebit x4",
        "value": 1.012,
        "mark": 1.01,
        "holds": False,
    }
    assert told.pop("loss of diloco:every=5 x2")["holds"]  # within 2 %
    assert told == {}


def test_a_record_keeps_what_a_comparable_one_has(tmp_path, capsys):
    def records(*outcomes):
        return [outcome.as_record() for outcome in outcomes]

    path = tmp_path / "gradsync_convergence.json"
    first = records(
        CellResult(cell("allreduce"), "done", found(1.0, 4.0)),
        CellResult(cell("topk"), "done", found(1.0, 5.0)),
    )
    about = {"steps": 9, "settings": {"optimizer.lr": 2e-3}}
    write_record("gradsync_convergence", {**about, "cells": first}, tmp_path)
    again = records(CellResult(cell("topk"), "done", found(1.0, 4.2)))
    kept = with_earlier(again, about, path)
    assert next(judge_convergence(kept))["value"] == 1.05
    assert all(len(one["date"]) == len("2026-01-01") for one in kept if one["strategy"] == "topk")
    lost = records(CellResult(cell("topk"), "failed", reason="it fell over"))
    assert next(judge_convergence(with_earlier(lost, about, path)))["value"] == 1.25
    assert [one["strategy"] for one in with_earlier(again, about, tmp_path / "none.json")] == ["topk"]
    assert [one["strategy"] for one in with_earlier(again, {**about, "steps": 8}, path)] == ["topk"]
    assert "another steps: its 2 trainings are left out" in capsys.readouterr().out


def test_a_slow_link_is_held_against_the_counted_ring_and_the_same_ranks_without_a_limit():
    ring, slow, often = "allreduce:algorithm=chunked_ring", "100mbit", "diloco:every=5"
    outcomes = [
        CellResult(cell(ring, link=slow), "done", found(1.0, 4.0, 1e6)),
        CellResult(cell("onebit", link=slow), "done", found(0.3, 4.0, 4.9e4)),
        CellResult(cell("topk", link=slow), "done", found(0.3, 4.0, 6e4)),
        CellResult(cell(often, link=slow), "done", found(0.2, 4.0, 2.1e5)),
        CellResult(cell(often, link="hosts"), "done", found(0.19, 4.0, 2.1e5)),
        CellResult(cell("streaming_diloco:every=5", link=slow), "done", found(0.2, 4.0, 3e5)),
        CellResult(cell("streaming_diloco:every=5", link="hosts"), "done", found(0.17, 4.0, 3e5)),
    ]
    told = {one["what"]: (one["value"], one["mark"], one["holds"]) for one in judge_link(outcomes)}
    assert told == {
        "bytes saved by onebit": (20.4082, 20, True),
        "bytes saved by topk": (16.6667, 20, False),
        f"bytes saved by {often}": (4.7619, 4.5, True),
        f"speed of {often}, of that without a limit": (0.95, 0.9, True),
        "bytes saved by streaming_diloco:every=5": (3.3333, 4.5, False),
        "speed of streaming_diloco:every=5, of that without a limit": (0.85, 0.9, False),
    }
