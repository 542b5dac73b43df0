"""The check of a CUDA machine, as far as it goes without one."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, train_step
from benchmarks.systems import Cell
from benchmarks.train_step import TINY, WORKLOADS, arguments
from shoal.bench.environments import FRAMEWORKS


def check(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *map(str, arguments)],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("part", ["", "nonsense"])
def test_a_part_that_does_not_exist_is_refused_with_those_that_do(part):
    done = check("--part", part)
    assert done.returncode == 1
    assert (
        "the parts are: train-tests, train, layouts-tests, layouts, bench-tests, bench, plan" in done.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_refused_in_a_sentence():
    done = check("--part", "train")
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr


def tiny_record(part, output):
    """Go through a part with a tiny model on the CPU and return its record."""
    done = check("--part", part, "--device", "cpu", "--tiny", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{part}: done; {output}" in done.stdout
    return json.loads(output.read_text())


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_part_of_training_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    record = tiny_record("train", tmp_path / "record.json")
    assert {entry["system"] for entry in record["results"]} == {"shoal", "transformers"}
    for entry in record["results"]:
        assert entry["median_tokens_per_s"] > 0
        assert entry["mfu_measured"] > 0
        assert entry["top_operations"][0]["share"] > 0
    assert record["summary"]["tiny"]["ratio_to_fastest_peer"] > 0
    assert record["versions"]["torch"] == torch.__version__


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_the_part_of_layouts_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    record = tiny_record("layouts", tmp_path / "record.json")
    assert set(record["results"]) == {"dp2", "tp2", "bare torch tp2"}
    assert all(entry["median_tokens_per_s"] > 0 for entry in record["results"].values())
    assert record["summary"]["tp2 / bare torch tp2"] > 0


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_the_part_of_the_bench_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    cells = tiny_record("bench", tmp_path / "record.json")["cells"]
    assert [cell["status"] for cell in cells] == ["done"] * 3


@pytest.mark.timeout(300)
@pytest.mark.proof
def test_the_part_of_the_plan_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    record = tiny_record("plan", tmp_path / "record.json")
    assert record["layout"] == "dp2"
    assert record["machine"]["physical_cores"] > 0
    assert set(record["versions"]) == {"python", "torch", "shoal"}
    assert record["pace"]["step_s"] > 0


@pytest.mark.timeout(300)
@pytest.mark.proof
def test_the_part_of_the_networks_runs_on_a_cpu_with_a_tiny_batch(tmp_path):
    record = tiny_record("networks", tmp_path / "record.json")
    assert [(row["cell"]["mode"], row["status"]) for row in record["rows"][:1]] == [("default", "done")]
    assert set(record["left_out"]) | {row["cell"]["framework"] for row in record["rows"]} == set(FRAMEWORKS)


def test_each_file_of_gpu_tests_belongs_to_one_part():
    files = sorted(path.name for path in (gpu_check.ROOT / "tests/gpu").glob("test_*.py"))
    assert files == sorted(f"test_{name}_gpu.py" for names in gpu_check.TESTS.values() for name in names)
    assert set(gpu_check.PARTS) == gpu_check.TESTS.keys() | gpu_check.TIMINGS.keys()


@pytest.mark.timeout(300)
@pytest.mark.proof
def test_the_gpu_tests_of_a_part_leave_their_results_where_they_are_wanted(tmp_path):
    done = check("--part", "bench-tests", "--device", "cpu", "--output", tmp_path / "tests.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_exchange_gpu" in (tmp_path / "tests.xml").read_text()


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    starter = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(300)"
    )
    monkeypatch.setattr(gpu_check, "END_S", 1.0)
    began = time.monotonic()
    assert not gpu_check.run([sys.executable, "-c", starter], dict(os.environ), 6)
    assert time.monotonic() - began < 150
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    until = time.monotonic() + 30  # the kernel ends it in its own time
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def gpu_grid(systems):
    wish = arguments(["--suite", "gpu", "--dtypes", "bf16", "--limit-s", "1000"])
    return wish, WORKLOADS["gpu"], systems


def test_on_a_gpu_shoal_is_measured_first_one_system_at_a_time_and_each_is_recorded(monkeypatch, tmp_path):
    kept, up = [], []

    def measured(cells, *_, **__):
        up.append([cell.system for cell in cells])
        if up[-1] == ["transformers"]:
            raise KeyboardInterrupt  # ended from outside
        return [{"name": cell.name} for cell in cells]

    monkeypatch.setattr(train_step, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        train_step.run_grid(
            *gpu_grid(["transformers", "shoal"]), tmp_path, lambda *so_far: kept.append(so_far)
        )
    assert up == [["shoal"]] * 4 + [["transformers"]]
    results, left_out = kept[-1]
    assert [entry["name"] for entry in results][:2] == [
        "gpt2 shoal bf16 compiled",
        "gpt2-medium shoal bf16 compiled",
    ]
    assert len(left_out) == 4
    assert all("transformers" in name for name in left_out)


def test_systems_of_a_cpu_take_turns():
    cells = [Cell(TINY, system, "fp32", compiled=False) for system in ("shoal", "transformers")]
    assert train_step.together([cells]) == [cells]


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.10.0", "2.11", True),
        ("2.11.0+cu130", "2.11", False),
        ("2.11.0a0+git1", "2.11", False),
        ("2", "2.0", False),
        ("10.0", "9.1", False),
        ("0.4.9", "0.5", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, least, older):
    assert gpu_check._older(version, least) == older


def test_every_requirement_of_the_project_has_its_oldest_version():
    names = (
        "torch",
        "numpy",
        "pydantic",
        "cyclopts",
        "rich",
        "tokenizers",
        "tiktoken",
        "safetensors",
        "xxhash",
    )
    assert gpu_check.requirements().keys() == {*names, "pytest", "pytest-timeout", "pytest-xdist"}


def test_a_wheel_that_is_too_old_is_a_sentence(tmp_path, capsys):
    wheel(tmp_path, "pydantic", "2.9.1")
    with pytest.raises(SystemExit, match=r"has pydantic 2\.9\.1, and Shoal needs 2\.10 or newer"):
        gpu_check.install_missing(tmp_path, tmp_path / "site")


@pytest.mark.proof
def test_a_held_package_that_is_too_old_is_a_sentence_or_comes_from_the_wheels(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "requirements", lambda: {"xxhash": "99.5"})
    with pytest.raises(SystemExit, match=r"has xxhash [\d.]+, and Shoal needs 99\.5 or newer"):
        gpu_check.check_python(dict(os.environ), "cpu")
    wheel(tmp_path, "xxhash", "99.5")
    gpu_check.install_missing(tmp_path, tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert gpu_check.check_python(environment, "cpu") == torch.cuda.device_count()


def wheel(folder, name, version="1.0"):
    """Make the smallest wheel that pip takes."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_only_what_is_missing_comes_from_the_wheels(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, version in (("shoal_absent_thing", "1.0"), ("numpy", "2.0"), ("typing_extensions", "1.0")):
        wheel(wheels, name, version)
    gpu_check.install_missing(wheels, site)
    assert [path.name for path in site.glob("*.py")] == ["shoal_absent_thing.py"]


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no wheels"):
        gpu_check.install_missing(tmp_path, tmp_path / "site")
