"""The check of a CUDA machine, as far as it goes without one."""

import json
import subprocess
import sys
import zipfile

import pytest
import torch

from benchmarks import gpu_check


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
    assert "the parts are: train, layouts, bench, plan" in done.stderr


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
    assert "gpu tests: passed; timing: done" in done.stdout
    return json.loads(output.read_text())


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
def test_the_part_of_the_plan_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    record = tiny_record("plan", tmp_path / "record.json")
    assert record["layout"] == "dp2"
    assert record["machine"]["physical_cores"] > 0
    assert set(record["versions"]) == {"python", "torch", "shoal"}
    assert record["pace"]["step_s"] > 0


def test_each_file_of_gpu_tests_belongs_to_one_part():
    files = sorted(path.name for path in (gpu_check.ROOT / "tests/gpu").glob("test_*.py"))
    assert files == sorted(f"test_{name}_gpu.py" for part in gpu_check.PARTS.values() for name in part.tests)


def wheel(folder, name):
    """Make the smallest wheel that pip takes."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_only_what_is_missing_comes_from_the_wheels(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name in ("shoal_absent_thing", "numpy", "typing_extensions"):
        wheel(wheels, name)
    gpu_check.install_missing(wheels, site)
    assert [path.name for path in site.glob("*.py")] == ["shoal_absent_thing.py"]


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no wheels"):
        gpu_check.install_missing(tmp_path, tmp_path / "site")
