"""Where `make setup` takes torch from, with pip replaced by a recorder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup(monkeypatch):
    """Load tools/setup.py as on Linux without a GPU; `setup.calls` records what pip would get."""
    spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls, module.refuses = [], ()

    def record(*arguments, complain=True):
        module.calls.append(" ".join(map(str, arguments)))
        return not any(word in module.calls[-1] for word in module.refuses)

    monkeypatch.setattr(module, "pip_install", record)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    return module


def test_cpu_build_comes_from_where_pip_is_configured_first(setup):
    assert setup.install_torch("2.13.0", "")
    assert setup.calls == ["--no-deps torch==2.13.0+cpu"]


def test_cpu_build_comes_from_pytorchs_index_otherwise(setup, monkeypatch):
    monkeypatch.setattr(setup, "refuses", ("torch==2.13.0+cpu",))
    assert not setup.install_torch("2.13.0", "")
    assert setup.calls[1] == "--no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"


def test_macos_and_machines_with_a_gpu_take_the_ordinary_build(setup, monkeypatch):
    monkeypatch.setattr(setup, "has_gpu", lambda: True)
    setup.install_torch("2.13.0", "")
    monkeypatch.setattr(setup, "has_gpu", lambda: False)
    monkeypatch.setattr(setup.sys, "platform", "darwin")
    setup.install_torch("2.13.0", "")
    assert setup.calls == ["--no-deps torch==2.13.0"] * 2


def test_named_source_may_be_an_index_a_folder_or_a_wheel(setup, tmp_path):
    for source in ("https://wheels.example/simple", str(tmp_path), "torch-2.13.0.whl"):
        setup.install_torch("2.13.0", source)
    assert setup.calls == [
        "--no-deps --index-url https://wheels.example/simple torch==2.13.0",
        f"--no-deps --no-index --find-links {tmp_path.resolve()} torch==2.13.0",
        "--no-deps torch-2.13.0.whl",
    ]


def test_good_torch_is_kept(setup, monkeypatch):
    monkeypatch.setattr(setup, "good_torch", lambda python: "2.11.0+cu130")
    assert setup.ensure_torch() == "2.11.0+cu130"
    assert setup.calls == []


def test_no_torch_to_be_had_is_a_sentence_with_what_to_do(setup, monkeypatch):
    monkeypatch.setattr(setup, "good_torch", lambda python: None)
    monkeypatch.setattr(setup, "refuses", ("torch",))
    with pytest.raises(SystemExit, match=r"no torch 2\.\d+.*\n.*TORCH_SOURCE="):
        setup.ensure_torch()


def test_what_another_torch_requires_is_left_to_it(setup):
    ours = (ROOT / "constraints.txt").read_text()
    version = re.findall(r"(?m)^torch==(.+)$", ours)[0]
    requirements = ["setuptools<82", "typing-extensions>=4.10.0"]
    assert setup.pins_beside(f"{version}+cpu", requirements).count("\nsetuptools==") == 1
    pins = setup.pins_beside("2.11.0+cu130", requirements)
    assert "\ntorch==2.11.0+cu130\n" in pins
    assert not {"setuptools", "typing_extensions"} & {line.split("==")[0] for line in pins.splitlines()}
    assert "\nnumpy==" in pins


def test_another_version_is_its_ordinary_build_and_no_other_is_kept(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "OTHER_TORCH", "2.11.0")
    setup.install_torch("2.11.0", "")
    assert setup.calls == ["--no-deps torch==2.11.0"]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2.13.0+cpu\n")
    python.chmod(0o755)
    assert setup.good_torch(python) is None


@pytest.mark.parametrize(
    ("version", "good"), [("2.10.0", False), ("2.11.0", True), ("3.0.0", True), ("", False)]
)
def test_torch_is_good_from_2_11(setup, tmp_path, version, good):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    assert (setup.good_torch(python) == version) is good


def stand_in(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Load tools/setup.py with a shell script in place of .venv's Python."""

    def load(script, extras):
        monkeypatch.setenv("VENV", str(tmp_path))
        monkeypatch.setenv("EXTRAS", extras)
        stand_in(tmp_path / "bin/python", script)
        spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_pip_is_heard_only_where_it_fails(pip, capfd):
    assert pip("echo a hundred lines", "test").pip_install("x")
    assert not pip("echo no such package; exit 1", "test").pip_install("x", complain=False)
    assert capfd.readouterr() == ("", "")
    module = pip("echo no such package; exit 1", "test")
    assert not module.pip_install("x")
    assert capfd.readouterr().err.strip() == "no such package"
    assert module.LOG.read_text() == "a hundred lines\n" + 2 * "no such package\n"


def test_progress_stays_on_one_line_of_80_columns(pip, capsys, monkeypatch):
    module = pip("", "test")
    monkeypatch.setattr(module.sys.stdout, "isatty", lambda: True, raising=False)
    module.show("Collecting a\n  Downloading " + 200 * "b" + "\n", 9.7)
    shown = capsys.readouterr().out.removeprefix("\r\033[K")
    assert shown.startswith("   10 s  Downloading bbb")
    assert len(shown) < 80


def test_what_the_demonstration_may_not_import_is_not_compiled_for_it(pip):
    for extras, compiled in (("test", True), ("data,report", False)):
        module = pip("echo $@", extras)
        module.pip_install("x")
        assert ("--no-compile" not in module.LOG.read_text().splitlines()[-1]) is compiled


def test_the_demonstration_installs_less_and_nothing_twice(tmp_path):
    """The Makefile, with a recorder in place of tools/setup.py, on an environment that is not there yet."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    recorder = "import os, pathlib\npathlib.Path('.venv').mkdir(exist_ok=True)\n"
    recorder += "print(os.environ['EXTRAS'], file=open('installed', 'a'))\n"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/setup.py").write_text(recorder)
    for name in ("shoal", "python"):
        stand_in(tmp_path / ".venv/bin" / name, "")

    def installed(*targets):
        (tmp_path / "installed").write_text("")
        environment = {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"}
        subprocess.run(["make", "-j4", *targets], cwd=tmp_path, check=True, env=environment)
        return (tmp_path / "installed").read_text().split()

    assert installed("demo") == ["data,report"]
    assert installed("demo") == []
    assert installed("test") == ["test"]
    for ready in (".ready", ".ready-demo"):
        os.utime(
            tmp_path / ".venv" / ready, (1, 1)
        )  # the clock of a file system is coarser than two of these lines
    assert installed("test") == ["test"]
    assert installed("demo", "test") == []


def test_everything_that_setup_installs_has_an_exact_pin():
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = re.findall(r"\w+", next(r for r in extras["test"] if r.startswith("shoal["))[5:])
    requirements = [*project["dependencies"], *extras["test"], *(r for name in chosen for r in extras[name])]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements} - {"shoal"}
    assert names - {line.split("==")[0] for line in lines if "==" in line} == set()
