"""A run against its plan: refused before it starts, compared after 20 steps, explained without memory."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.config.load import load_config
from shoal.errors import InputError
from shoal.plan import grading
from shoal.plan.grading import PHASES, grade, out_of_memory, plan_run, remedies
from shoal.runtime.device import Device
from shoal.runtime.files import cache_folder
from shoal.train.worker import _planned
from tests import commands
from tests.train.commands import arguments_of, shoal

GB = 10**9


def config_of(data, **settings):
    model = {"n_layers": 2, "d_model": 256, "n_heads": 4, "max_seq_len": 64}
    train = {"global_batch_size": 16, "micro_batch_size": 8, "seq_len": 64}
    values = {
        "model": model,
        "train": train,
        "data": {"datasets": [str(data)]},
        "precision": {"dtype": "fp32"},
    }
    return load_config("tiny", {**values, **settings})


def with_memory(monkeypatch, num_bytes):
    monkeypatch.setattr("shoal.plan.here.usable_memory", lambda: num_bytes)


def test_what_cannot_fit_is_refused_with_what_would(data, monkeypatch):
    config = config_of(data)
    needed = plan_run(config, 2, 1)["memory"]["total_bytes"]
    with_memory(monkeypatch, int(2 * 0.95 * needed))
    with pytest.raises(InputError, match=r"dp2, micro-batch 8 does not fit: a rank needs .* of") as raised:
        plan_run(config, 2, 1)
    assert raised.value.hint.startswith(("use train.", "use parallel."))
    assert raised.value.hint.endswith("--force starts all the same")
    assert plan_run(config, 2, 1, force=True)["fits"] is False


def test_what_the_planner_does_not_know_is_not_refused(data):
    assert plan_run(config_of(data, sync={"strategy": "diloco"}), 2, 1) is None
    assert plan_run(load_config("fcn-r"), 1, 1) is None
    assert plan_run(config_of(data), 3, 1) is None  # training says why


def stored(data, folder, monkeypatch, processes=1):
    (folder / "plan.json").write_text(json.dumps(plan_run(config_of(data), processes, 1)))
    return json.loads((folder / "plan.json").read_text())


def test_a_run_is_compared_by_the_median_without_its_first_steps(data, tmp_path, monkeypatch):
    plan = stored(data, tmp_path, monkeypatch)
    slow = dict.fromkeys((f"{name}_s" for name in PHASES), 9.0)
    usual = {f"{name}_s": 2 * plan["time"]["phases"][name] for name in PHASES}
    step_s = 2 * plan["time"]["step_s"]
    lines = [{"step": n, "seconds": 99.0, **slow} for n in range(1, 6)]
    lines += [{"step": n, "seconds": step_s, **usual} for n in range(6, 21)]
    table = grade(tmp_path, lines, {"reserved_bytes": 2 * plan["memory"]["reserved_bytes"]})
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["plan", "compared", "with", "steps", "6", "to", "20:"]
    assert [row[-1] for row in rows if row[0] in ("reserved", "step", "forward")] == ["-50%"] * 3
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["measured"]["step_s"] == step_s
    assert kept["predicted"]["step_s"] == plan["time"]["step_s"]
    again = plan_run(config_of(data), 1, 1)["time"]["step_s"]
    assert plan["time"]["step_s"] < again <= step_s  # the next plan has learned


def planned(run_dir, rank):
    process = SimpleNamespace(device=Device(torch.device("cpu"), "gloo", "CPU"), rank=rank)
    return _planned(SimpleNamespace(run_dir=run_dir), process)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_that_runs_out_of_memory_is_told_the_plan(data, tmp_path, monkeypatch, rank):
    stored(data, tmp_path, monkeypatch, 2)
    with pytest.raises(MemoryError) as ended, planned(tmp_path, rank):
        raise MemoryError
    assert ended.value.__notes__[0].startswith(f"rank {rank} ran out of memory under dp2")


def test_no_error_of_the_comparison_ends_a_run_or_hides_another(data, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("shoal.train.worker.log.info", told.append)
    (tmp_path / "plan.json").write_text('{"layout": 3')

    def run():
        with planned(tmp_path, 0) as compare:
            compare([])
            raise MemoryError("the first")

    with pytest.raises(MemoryError, match="the first") as ended:
        run()
    assert f"warning: {tmp_path / 'plan.json'} is not compared: " in told[0]
    assert "is not compared: " in ended.value.__notes__[0]


def test_out_of_memory_names_three_remedies_the_cheapest_first(data, tmp_path, monkeypatch):
    stored(data, tmp_path, monkeypatch, 2)
    table = out_of_memory(tmp_path, 1, {"reserved_bytes": GB})
    lines = table.splitlines()
    assert lines[0].startswith("rank 1 ran out of memory under dp2, micro-batch 8; ")
    assert "predicted at the peak" in table
    at = next(i for i, line in enumerate(lines) if line.startswith("the cheapest remedies"))
    assert len(lines) - at - 1 == 3
    assert len({line.split(" = ")[0] for line in lines[at + 1 :]}) == 3  # of three settings
    costs = [float(line.split("less, ")[1].split("%")[0]) for line in lines[at + 1 :]]
    assert costs == sorted(costs)


def test_remedies_that_fit_come_before_cheaper_ones_that_do_not(data, tmp_path, monkeypatch):
    plan = grading.plan_of(stored(data, tmp_path, monkeypatch, 2), rank=0)
    sizes = [other.memory.total_bytes for _, other in remedies(plan)]
    device = plan.workload.cluster.device
    tight = grading.replace(device, memory_bytes=min(sizes))
    small = grading.replace(
        plan,
        workload=grading.replace(plan.workload, cluster=grading.replace(plan.workload.cluster, device=tight)),
    )
    assert next(other.fits for _, other in remedies(small))


def test_a_real_run_stores_its_plan_and_compares_it(data, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    status, screen = shoal(data, tmp_path / "run", "--train.steps", "20", "--nproc", "2")
    assert status == 0, screen
    assert "plan compared with steps 6 to 20:" in screen
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["layout"] == "dp2"
    assert plan["measured"]["step_s"] > 0
    assert plan["measured"]["memory"]["reserved_bytes"] > 0
    assert (tmp_path / ".cache/shoal/calibration.json").exists()


def test_tests_leave_the_users_folder_as_it_is(data, tmp_path):
    mine = cache_folder() / "calibration.json"
    assert not mine.is_relative_to(Path.home())
    users = Path.home() / ".cache/shoal/calibration.json"
    before = users.exists() and users.stat().st_mtime_ns
    status, screen = shoal(data, tmp_path / "run", "--train.steps", "20")
    assert status == 0, screen
    assert mine.exists()
    assert (users.exists() and users.stat().st_mtime_ns) == before


def test_layout_auto_trains_as_the_planner_chooses(data, tmp_path):
    words = ("--layout", "auto", "--nproc", "2", "--train.steps", "2")
    status, screen = shoal(data, tmp_path / "run", *words)
    assert status == 0, screen
    chosen = next(line for line in screen.splitlines() if line.startswith("layout: "))
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert chosen == f"layout: {plan['settings']}"
    assert f"  layout       {plan['layout']}: 2 processes" in screen


def test_layout_auto_replaces_a_split_for_other_stages(data, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[parallel]\npp = 3\nsplit = [1, 1, 0]\n")
    words = ("--layout", "auto", "--nproc", "2", "--train.steps", "1")
    train, _, *options = arguments_of(data, tmp_path / "run", *words)
    done = commands.run(train, str(file), *options, timeout=90)
    assert done.returncode == 0, done.stderr
    assert sum(load_config(str(tmp_path / "run/config.toml")).parallel.split) == 2


def test_layout_auto_keeps_a_split_that_is_given(data, tmp_path):
    options = arguments_of(data, tmp_path / "run", "--layout", "auto", "--nproc", "2", "--train.steps", "1")
    done = commands.run(*options, "--parallel.split", "1", "--parallel.split", "1", timeout=90)
    assert done.returncode == 0, done.stderr
    assert "layout: pp2" in done.stdout
    assert load_config(str(tmp_path / "run/config.toml")).parallel.split == (1, 1)


def test_layout_auto_does_not_choose_what_is_given(data, tmp_path):
    for words, problem in (
        (("--parallel.tp", "1"), "--layout auto chooses parallel.tp, and so does --parallel.tp"),
        (("--nnodes", "2"), "--layout auto is for the processes that this command starts on one host"),
    ):
        status, screen = shoal(data, tmp_path / "run", "--layout", "auto", *words)
        assert status == 2
        assert problem in screen


def test_a_planner_that_fails_stops_no_run(data, monkeypatch):
    monkeypatch.setattr(grading, "plan_layout", lambda *facts: 1 / 0)
    assert plan_run(config_of(data), 1, 1) is None


def test_a_calibration_that_cannot_be_kept_is_told_below_the_comparison(data, tmp_path, monkeypatch):
    plan = stored(data, tmp_path, monkeypatch)
    usual = {f"{name}_s": plan["time"]["phases"][name] for name in PHASES}
    lines = [{"step": n, "seconds": 1.0, **usual} for n in range(1, 21)]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/below"))
    table = grade(tmp_path, lines, {}).splitlines()
    assert any(line.startswith("  step ") for line in table)
    assert table[-1].startswith("  not kept for later plans: ")


BIG = ("--model.n_layers", "12", "--model.d_model", "262144", "--model.n_heads", "16")  # 40 TB of weights


def test_a_real_run_that_cannot_fit_is_refused_and_with_force_told_what_to_do(data, tmp_path):
    status, screen = shoal(data, tmp_path / "run", *BIG)
    assert status == 2
    assert "does not fit: a rank needs" in screen
    assert not (tmp_path / "run").exists()
    words = ("--nproc", "2", "--max-restarts", "0", "--max-time", "60")
    status, screen = shoal(data, tmp_path / "run", *BIG, *words, "--force", "--verbose")
    assert status == 1
    told = screen.partition("Traceback")[2]  # of either rank
    assert "ran out of memory under dp2" in told, screen
    assert "the cheapest remedies, with their predicted effect:" in told
    assert "parallel.zero = " in told
