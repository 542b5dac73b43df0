"""examples/launch, each run between two hosts: two terminals and ssh; Slurm's and Kubernetes' part played.

The hosts are network namespaces. `ssh`, `srun` and `scontrol` are stand-ins that enter them, as no test can
count on a server or a cluster; the scripts themselves and what they start are the real ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from shoal.bench.hosts import ADDRESSES, NAMES, TwoHosts
from tests.tiny_dataset import random_dataset
from tests.train.commands import SMALL
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "examples" / "launch"
SIZES = ["tiny", "--data", "walk", "--runtime.timeout_s", "60"]
SIZES += [word if word != "4" else "2" for word in SMALL]  # sequences: two for each of four ranks
LIMIT_S = 120

SSH = """\
#!{python}
# ssh HOST COMMAND: the words become one line for a shell there
import json, os, sys
os.execvp("ip", [*json.loads(os.environ["ENTER"])[sys.argv[1]], "sh", "-c", " ".join(sys.argv[2:])])
"""
SRUN = """\
#!{python}
# srun: two tasks on each of two nodes, with the variables that Slurm gives them; the highest status is ours
import json, os, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
tasks = []
for node, enter in enumerate(json.loads(os.environ["ENTER"]).values()):
    for local in range(2):
        task = {{"SLURM_PROCID": 2 * node + local, "SLURM_LOCALID": local, "SLURM_NODEID": node}}
        task |= {{"SLURM_NTASKS": 4, "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_ID": 0}}
        env = os.environ | {{name: str(value) for name, value in task.items()}}
        tasks.append(subprocess.Popen([*enter, *sys.argv[2:]], env=env))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """\
#!{python}
import json, os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(*json.loads(os.environ["ENTER"]), sep="\\n")
else:
    open("scontrol.log", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def environment(two_hosts, tmp_path) -> dict[str, str]:
    """Return variables with which the stand-ins are found and enter the two hosts, in a folder with data."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text.format(python=sys.executable))
        (programs / name).chmod(0o755)
    random_dataset(tmp_path / "walk")
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    enter = json.dumps({ADDRESSES[name]: two_hosts.enter(name) for name in NAMES})
    return {"PATH": path, "ENTER": enter, "OMP_NUM_THREADS": "1"}


def steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    found = re.findall(r'"step": (\d+), "tokens"', metrics.read_text()) if metrics.exists() else []
    return int(found[-1]) if found else 0


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + LIMIT_S
    while steps(folder) < step:
        assert time.monotonic() < until, f"no step {step} in time"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def both(two_hosts: TwoHosts, commands: dict[str, list[str]], folder: Path, **env: str) -> dict[str, str]:
    """Run a command on each host to its good end; return what was on the screens."""
    processes = {name: two_hosts.start(name, commands[name], folder, **env) for name in NAMES}
    screens = {name: process.communicate(timeout=LIMIT_S)[0] for name, process in processes.items()}
    assert [process.returncode for process in processes.values()] == [0, 0], screens
    return screens


@pytest.mark.proof
def test_two_terminals(two_hosts, environment, tmp_path):
    words = ["sh", str(LAUNCH / "two-terminals.sh"), two_hosts.rdzv, *SIZES]
    words += ["--run-dir", "run", "--nproc", "2", "--train.steps", "3"]
    screens = both(two_hosts, dict.fromkeys(NAMES, words), tmp_path, **environment)
    assert "2 hosts meet at 10.77.0.1:29400: north, south" in screens["south"]
    assert steps(tmp_path / "run") == 3


@pytest.mark.proof
def test_ssh_starts_all_hosts_and_stops_them_with_everything_saved(two_hosts, environment, tmp_path):
    environment["HOSTS"] = " ".join(ADDRESSES.values())
    words = ["bash", str(LAUNCH / "ssh.sh"), *SIZES, "--run-dir", "my run", "--nproc", "2"]
    process = start([*words, "--train.steps", "100000"], tmp_path, environment)
    wait_for_step(tmp_path / "my run", 3, process)
    process.send_signal(signal.SIGTERM)
    screen, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, screen
    assert "all is saved" in screen
    assert not list(tmp_path.glob(".launcher-*"))


@pytest.mark.proof
def test_slurm_saves_and_is_queued_again_and_goes_on(two_hosts, environment, tmp_path):
    environment |= {"RUN": "run", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "fake[1-2]"}
    words = ["bash", str(LAUNCH / "slurm.sh"), *SIZES, "--train.steps", "4"]
    for stop_after, last in ((["--stop-after", "2"], 2), ([], 4)):
        process = start([*words, *stop_after], tmp_path, environment)
        screen, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, screen
        assert steps(tmp_path / "run") == last
        assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"  # once, by the first
    assert "resumed from step-00000002" in screen


def test_slurm_starts_again_after_a_failure_but_not_after_bad_input(two_hosts, environment, tmp_path):
    (tmp_path / "bin/srun").write_text("#!/bin/sh\necho >> calls\nexit $STATUS\n")
    environment |= {"RUN": "run", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "fake[1-2]"}
    for status, calls in ((1, 3), (2, 1)):
        (tmp_path / "calls").unlink(missing_ok=True)
        process = start(
            ["bash", str(LAUNCH / "slurm.sh"), "tiny"], tmp_path, environment | {"STATUS": str(status)}
        )
        process.communicate(timeout=LIMIT_S)
        assert (process.returncode, len((tmp_path / "calls").read_text())) == (status, calls)
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.proof
def test_kubernetes_pods_meet_by_their_number(two_hosts, environment, tmp_path):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [first] = [variable["value"] for variable in container["env"] if variable["name"] == "FIRST"]
    assert first == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    [script] = container["args"]
    script = script.replace("gpt2 --data /data/datasets/mine", " ".join([*SIZES, "--train.steps", "3"]))
    script = script.replace("/data/runs/first", "run")
    commands = {
        name: ["env", f"JOB_COMPLETION_INDEX={number}", *container["command"], script]
        for number, name in enumerate(NAMES)
    }
    both(two_hosts, commands, tmp_path, FIRST=ADDRESSES["north"], **environment)
    assert steps(tmp_path / "run") == 3


def test_the_image_gets_every_file_that_the_installation_needs():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied), copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert wanted | set(project["tool"]["setuptools"]["packages"]["find"]["where"]) <= set(copied)
    [install] = [line for line in lines if "pip install" in line]
    assert re.findall(r"--constraint (\S+)", install)[0] in copied


@pytest.mark.proof
def test_torchrun_between_two_hosts(two_hosts, environment, tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    words += ["--master-addr", ADDRESSES["north"], "--master-port", "29400"]
    train = ["-m", "shoal", "train", *SIZES, "--run-dir", "run", "--train.steps", "3"]
    commands = {name: [*words, "--node-rank", str(number), *train] for number, name in enumerate(NAMES)}
    both(two_hosts, commands, tmp_path, **environment)
    assert steps(tmp_path / "run") == 3
