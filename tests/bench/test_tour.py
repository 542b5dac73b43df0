"""`shoal bench all`: its time is kept, what does not fit is named, what is there is not measured again."""

import json
import re
import subprocess
import sys
import time

import pytest

from shoal.bench import tour
from shoal.bench.read_records import load
from shoal.bench.tour import Stage, measure, run_stage, stages
from shoal.errors import InputError
from tests.bench import made_up
from tests.bench.made_up import network_row


class Machine:
    """Runs stages on a clock of its own; a row takes `row_s`, and those that fit are in the record."""

    def __init__(self, row_s, problem=""):
        self.now, self.row_s, self.problem, self.ran = 0.0, row_s, problem, []

    def run(self, stage, limit_s):
        self.ran.append((stage.name, round(limit_s)))
        held = json.loads(stage.record.read_text())["rows"] if stage.record.exists() else []
        until = self.now + limit_s
        for name in stage.missing():
            if self.now + self.row_s > until:
                self.now = until
                break
            self.now += self.row_s
            network, _, batch = name.partition(" pytorch default batch ")
            held.append(network_row(network, batch=int(batch.split(",")[0])))
            stage.record.write_text(json.dumps(made_up.networks(held)))
        return self.problem


@pytest.fixture
def planned(tmp_path):
    def stage(name, share):
        rows = tuple(f"{name} pytorch default batch {batch}, 4 threads" for batch in (16, 32, 64))
        return Stage(f"networks {name}", (), tmp_path / "networks.json", rows, share)

    return [stage("one", 1.0), stage("two", 2.0), stage("three", 1.0)]


def test_with_enough_time_each_stage_measures_all_and_the_rest_goes_to_later_ones(planned):
    machine = Machine(row_s=10)
    assert measure(planned, 400, machine.run, lambda: machine.now) == ([], False)
    assert machine.ran == [("networks one", 100), ("networks two", 247), ("networks three", 340)]


def test_with_less_time_stages_shrink_and_what_is_left_out_is_named(planned):
    machine = Machine(row_s=15)
    notes, failed = measure(planned, 120, machine.run, lambda: machine.now)
    assert machine.now <= 120
    assert not failed
    assert machine.ran == [("networks one", 30), ("networks two", 60), ("networks three", 45)]
    left = "one pytorch default batch 64, 4 threads"
    assert notes == [f"1 row left out for lack of time: {left}."]


def test_of_many_rows_that_are_left_out_some_are_named(planned, monkeypatch):
    monkeypatch.setattr(tour, "_MOST_NAMED", 1)
    notes, _ = measure(planned, 1, lambda *_: "", lambda: 0.0)
    assert notes == ["9 rows left out for lack of time: one pytorch default batch 16, 4 threads; 8 more."]


def test_a_stage_without_its_least_time_is_left_out(planned):
    machine = Machine(row_s=5)
    notes, _ = measure(planned, 70, machine.run, lambda: machine.now)
    assert [name for name, _ in machine.ran] == ["networks two", "networks three"]
    (note,) = notes
    assert note.startswith("3 rows left out for lack of time: one pytorch default batch 16, 4 threads; one ")


def test_the_next_run_measures_what_is_missing_and_nothing_twice(planned):
    machine = Machine(row_s=15)
    measure(planned, 120, machine.run, lambda: machine.now)
    machine.ran.clear()
    assert measure(planned, 120, machine.run, lambda: machine.now) == ([], False)
    assert machine.ran == [("networks one", 120)]
    rows = json.loads(planned[0].record.read_text())["rows"]
    assert len(rows) == 9


def test_a_stage_that_fails_is_told_and_the_others_run(planned):
    machine = Machine(row_s=15, problem="status 1, no memory")
    notes, failed = measure(planned, 400, machine.run, lambda: machine.now)
    assert failed
    assert notes[0] == "networks one failed: status 1, no memory"
    assert len(machine.ran) == 3


def test_the_plan_has_the_installed_frameworks_and_threads_up_to_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tour, "python_of", lambda name, given: "python" if name in ("pytorch", "jax") else None
    )
    monkeypatch.setattr(tour, "physical_cores", lambda: 6)
    found = {stage.name: stage for stage in stages(tmp_path)}
    first, later = found["networks fcn-r"], found["networks fcn-r, all settings"]
    assert "pytorch jax --batch-sizes 32 --threads 6" in " ".join(first.words)
    assert "pytorch jax --batch-sizes 32 128 --threads 1 2 4 6" in " ".join(later.words)
    assert (len(first.rows), len(later.rows)) == (2 * 2, 2 * 2 * 2 * 4)
    assert set(first.rows) < set(later.rows)
    collectives, gradsync = found["collectives"], found["gradsync"]
    assert collectives.missing() == ["collectives"]
    cells = [made_up.gradsync_cell(name, 2) for name in tour._STRATEGIES]
    strategies = {**made_up.gradsync(), "cells": cells}
    made_up.write(tmp_path, collectives=made_up.collectives(), gradsync=strategies)
    assert collectives.missing() == []
    assert gradsync.missing() == ["allreduce x1"]


def shell(monkeypatch, tmp_path, text):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(tour.sys, "executable", str(program))
    return Stage("networks one", (), tmp_path / "networks.json", (), 1.0)


def test_a_stage_ends_with_its_time_and_so_does_what_it_has_started(monkeypatch, tmp_path):
    stage = shell(monkeypatch, tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid; trap 'exit 143' TERM; wait")
    ticks = []
    assert run_stage(stage, 0.6, lambda: ticks.append(1)) == ""
    assert ticks
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while (state := tmp_path.joinpath(f"/proc/{pid}/stat")).exists() and ") Z " not in state.read_text():
        assert time.monotonic() < until, "the child of a stage outlives it"
        time.sleep(0.05)


def test_a_stage_that_fails_says_why(monkeypatch, tmp_path):
    stage = shell(monkeypatch, tmp_path, "echo 'error: no such network'; echo '  hint: none'; exit 2")
    assert run_stage(stage, 30, lambda: None).startswith("status 2, no such network hint: none (")
    stage = shell(monkeypatch, tmp_path, "exit 0")
    assert run_stage(stage, 30, lambda: None) == ""


def test_the_answer_stands_first_in_the_report_and_last_on_the_screen(monkeypatch, tmp_path, capsys):
    def run(stage, limit_s, watch):
        watch()
        if stage.name == "networks fcn-r":
            made_up.write(
                tmp_path / "tour", networks=made_up.networks([network_row(), network_row(label="jax tuned")])
            )
        return "status 1, no" * (stage.name == "collectives")

    monkeypatch.setattr(tour, "run_stage", run)
    assert tour.command(tmp_path / "tour", 5) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"Here: jax tuned, 4 threads, batch size 128: 1\.\d+ times the samples/s of .*", lines[-1]
    )
    assert "collectives failed: status 1, no" in lines
    page = (tmp_path / "tour/report.html").read_text()
    assert page.index(lines[-1]) < page.index("collectives failed: status 1, no") < page.index("<h2>")


@pytest.mark.parametrize("minutes", [0.1, -1, float("nan"), float("inf")])
def test_a_time_in_which_nothing_fits_is_refused(tmp_path, minutes):
    with pytest.raises(InputError, match="--minutes"):
        tour.command(tmp_path / "tour", minutes)
    assert not (tmp_path / "tour").exists()


@pytest.mark.proof
@pytest.mark.alone
def test_a_tour_of_this_machine_keeps_its_time_and_continues(tmp_path):
    words = [sys.executable, "-m", "shoal", "bench", "all", "--output", str(tmp_path / "tour"), "--minutes"]
    began = time.monotonic()
    done = subprocess.run([*words, "3"], capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 3 * 60 + 45
    assert done.stdout.splitlines()[-1].startswith("Here: pytorch ")
    assert "left out for lack of time" in done.stdout
    assert load(tmp_path / "tour/networks.json").timed
    assert "<img " in (tmp_path / "tour/report.html").read_text()
