"""Real ranks of a real MPI, for tests."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or find_spec("mpi4py") is None, reason="needs an MPI: pip install 'shoal[mpi]'"
)


def mpirun(ranks, *words, timeout=120):
    """Run Python with these words on some ranks of this machine."""
    options = ["--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    return subprocess.run(
        [MPIRUN, *options, sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
