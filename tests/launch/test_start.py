"""What the processes of a plain run load."""

import json

from tests.train.commands import shoal

# What is registered is inherited by forked ranks; each process leaves a file when it ends.
REPORT = """
import atexit, json, os, pathlib, sys
def report():
    loaded = sorted({name.split(".")[1] for name in sys.modules if name.startswith("shoal.")})
    file = pathlib.Path(os.environ["REPORTS"], f"{os.getpid()}.json")
    file.write_text(json.dumps([os.environ.get("RANK"), loaded]))
atexit.register(report)
"""
BESIDE = {"strategies", "comm", "diagnosis", "interop", "plan", "bench", "doctor", "parity", "infer"}


def test_a_plain_run_of_two_ranks_loads_the_core_alone(data, tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    (tmp_path / "sitecustomize.py").write_text(REPORT)
    env = {"PYTHONPATH": str(tmp_path), "REPORTS": str(reports)}
    status, screen = shoal(data, tmp_path / "run", "--nproc", "2", "--train.steps", "3", env=env)
    assert status == 0, screen
    found = {
        rank: set(loaded) for rank, loaded in (json.loads(path.read_text()) for path in reports.iterdir())
    }
    assert {"0", "1"} <= found.keys()
    assert {rank: loaded & BESIDE for rank, loaded in found.items() if rank} == {"0": set(), "1": set()}
    assert found[None] & {*BESIDE, "plan"} <= {"diagnosis", "plan"}, "the launcher watches, and plans"
