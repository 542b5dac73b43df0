"""A power cut at any moment of a save: no checkpoint that can be seen is damaged, and no good one is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.checkpoint.manifest import committed, read_manifest, step_of, verify
from tests.cases import every
from tests.checkpoint.ranks import full_tensors, load_latest, open_store, save_steps
from tests.checkpoint.retention import ONLY_LAST, THINNED
from tests.pool import Pool
from tests.power_cut import Disk, Event, record

# How likely a change that was not synced has arrived; the two extremes are an orderly disk's.
LIKELY = [0.0, 1.0, 0.5, 0.5, 0.9]


def save_more(mark: Callable[[int], None], folder: Path, steps: list[int], retention: dict) -> None:
    """Save some steps, one after the other, in a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = open_store(folder, **retention)
    for step in steps:
        store.save(step, full_tensors(step), {"step": step}, {"config.toml": b"seed = 1\n"})
        store.wait()
        mark(step)


def cuts(disk: Disk, events: list[Event], out: Path) -> Iterator[tuple[int, Path]]:
    """Yield (last mark, what is left) for a cut before each event and after all, in each way of `LIKELY`."""
    last = 0
    for number, event in enumerate([*events, None]):
        for way, likely in enumerate(LIKELY):
            folder = out / f"cut-{number}-{way}"
            disk.after_cut(folder, random.Random(f"{number} {way}"), likely)
            yield last, folder
        if event is not None:
            disk.play(event)
            last = event[2] if event[0] == "mark" else last


@pytest.mark.parametrize(
    ("before", "retention"),
    every(4, [([1, 2], THINNED), ([1, 2], ONLY_LAST), ([], ONLY_LAST), ([], THINNED)]),
    ids=["old-run-thinning", "old-run-removal", "new-run-removal", "new-run-thinning"],
)
def test_newest_good_step_survives_a_power_cut_at_any_moment(
    pool: Pool, tmp_path: Path, before: list[int], retention: dict
):
    run = tmp_path / "run"
    run.mkdir()
    if before:
        pool.run(save_steps, 1, run / "checkpoints", before)
    disk = Disk(run)
    events = record(run, save_more, run / "checkpoints", [3, 4], retention)
    found = []
    for saved, left in cuts(disk, events, tmp_path / "cuts"):
        here = committed(left / "checkpoints")
        problems = {path.name: verify(path) for path in here}
        assert not any(problems.values()), (left.name, problems)
        good = [step_of(path) for path in here if not read_manifest(path).weights_only]
        assert max(good, default=0) >= max([saved, *before]), left.name
        latest = left / "checkpoints" / "LATEST"
        assert not latest.exists() or int(latest.read_text()) in good, left.name
        found.append((left / "checkpoints", max(good, default=None)))
    assert disk.names() == {str(path.relative_to(run)) for path in run.rglob("*")}  # all was recorded
    assert {step for _, step in found} == {2 if before else None, 3, 4}
    some = found[:: 1 + len(found) // 100]
    assert pool.run(resume_all, 1, [folder for folder, _ in some]) == [[step for _, step in some]]


def resume_all(folders: list[Path]) -> list[int | None]:
    """Open and load each."""
    return [load_latest(folder) for folder in folders]
