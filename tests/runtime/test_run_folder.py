"""Errors about a run's folder, and who holds it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.config.sections import Config
from shoal.errors import InputError, ShoalError
from shoal.launch import start
from shoal.runtime.files import alone_in
from shoal.runtime.rank_info import RankInfo
from shoal.runtime.run_folder import in_sentences
from shoal.train import worker
from shoal.train.request import Request

LASTING = {"EIO": False, "ESTALE": False, "ENOENT": False, "ENOSPC": True, "EACCES": True, "ENOTDIR": True}


@pytest.mark.parametrize(("number", "lasts"), LASTING.items())
def test_only_what_a_restart_cannot_mend_ends_a_job(tmp_path: Path, monkeypatch, number: str, lasts: bool):
    def failing(request: Request) -> bool:
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code), str(request.run_dir / "metrics.jsonl"))

    monkeypatch.setattr(worker, "_train", failing)
    monkeypatch.setattr(worker, "to_rank_file", lambda *_, **__: None)
    monkeypatch.setattr(worker, "all_is_loaded", lambda: None)
    with pytest.raises(ShoalError if lasts else OSError, match=r"metrics\.jsonl"):
        worker.run(Request(Config(), tmp_path))
    told = json.loads((tmp_path / "ranks/rank-0/error.json").read_text())
    assert told["fatal"] is lasts
    assert "Traceback" not in told["message"]


def test_an_error_that_may_be_of_a_read_is_not_called_one_of_a_write(tmp_path: Path):
    (tmp_path / "ranks").write_text("")
    with (
        pytest.raises(InputError, match=r"ranks/stopped cannot be used: Not a directory"),
        in_sentences(tmp_path),
    ):
        (tmp_path / "ranks/stopped").read_text()


@pytest.mark.parametrize(("rank", "local_rank", "folder"), [(0, 0, "."), (1, 1, ""), (2, 0, "ranks/first-2")])
def test_the_first_rank_of_a_host_holds_the_folder_under_torchrun(
    tmp_path: Path, monkeypatch, rank: int, local_rank: int, folder: str
):
    def run(request: SimpleNamespace) -> int:
        for name in (".", "ranks/first-2"):
            if name == folder:
                with pytest.raises(InputError, match="another process is at work"), alone_in(tmp_path / name):
                    pass
            else:
                with alone_in(tmp_path / name):
                    pass
        return 7

    monkeypatch.setattr(worker, "run", run)
    (tmp_path / "metrics.jsonl").mkdir()
    layout = SimpleNamespace(num_replicas=1)
    request = SimpleNamespace(run_dir=tmp_path, config=Config(), resolve_layout=lambda size: layout)
    assert start._as_rank(request, None, 1, RankInfo(rank, 4, local_rank, 2)) == 7
    assert (tmp_path / "metrics.jsonl.bad").is_dir() == (rank == 0)
