"""Kill a training run again and again, at random and in every phase of saving, and damage its files.

Claims: every resume takes the newest good checkpoint, and the final weights are bit-equal to an uninterrupted
run's. Run it from the root of the repository: python -m benchmarks.kill_storm --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from safetensors.numpy import load_file

from benchmarks.record import RECORDS, write_record
from shoal.checkpoint.manifest import committed, resolve_checkpoint, verify
from shoal.errors import CheckpointError
from tests.checkpoint.damage import cut_short, files_of, flip_bit
from tests.commands import Command
from tests.tiny_dataset import random_dataset

PATIENCE_S = 120.0
OPTIONS = [
    "--nproc=2",
    "--max-restarts=100000",
    "--train.steps=90",
    "--train.micro-batch-size=8",
    "--checkpoint.every=3",
    "--checkpoint.keep-last=3",
    "--eval.every=0",
    "--model.n-layers=2",
    "--model.d-model=64",
    "--model.dropout=0.1",
]
# When to strike: what to wait for, how long at the most to go on waiting, and how often this is chosen.
MOMENTS = {"any": (5.0, 2), "writing": (0.15, 4), "committed": (0.02, 2), "retention": (0.001, 2)}


def matches(text: str, pattern: str) -> list[str]:
    """Return all matches in a text."""
    return re.findall(pattern, text)


class Run:
    """One run folder under `shoal train`, started again whenever its launcher dies."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._words = ["train", "tiny", f"--data={data}", f"--run-dir={folder}", *OPTIONS]
        self.start()

    def start(self) -> None:
        """Start the launcher."""
        self.launcher = Command(*self._words)

    def done(self) -> bool:
        """Say whether the run came to its end; it must not end in any other way."""
        status = self.launcher.poll()
        if status not in (None, 0, -signal.SIGKILL):
            raise AssertionError(f"status {status}: {''.join(self.launcher.said())[-2000:]}")
        return status == 0

    def workers(self) -> dict[int, int]:
        """Return rank -> process id of the ranks that are alive."""
        found: dict[int, int] = {}
        for file in self.folder.glob("ranks/rank-*/pid"):
            with contextlib.suppress(OSError, ValueError):  # it is going, or just beginning
                pid = int(file.read_text())
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.launcher.pid:  # and not of an earlier start
                    found[int(file.parent.name.removeprefix("rank-"))] = pid
        return found

    def resumed(self) -> list[str]:
        """Return the checkpoints that rank 0 said it resumed from, in order."""
        log = self.folder / "ranks" / "rank-0" / "log"
        return matches(log.read_text(errors="replace") if log.exists() else "", r"resumed from (step-\d+)")

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl."""
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text(errors="replace").splitlines() if metrics.exists() else []
        steps = [int(found[0]) for line in lines[-2:] if (found := matches(line, r'^\{"step": (\d+)'))]
        return max(steps, default=0)

    def newest_good(self) -> str | None:
        """Return the name of the checkpoint that a resume has to take."""
        try:
            return resolve_checkpoint(self.checkpoints).name if self.checkpoints.exists() else None
        except CheckpointError:
            return None

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor of the newest checkpoint, weights and moments."""
        return {
            f"{file.parent.name}.{name}": xxhash.xxh3_128(tensor.tobytes()).hexdigest()
            for file in committed(self.checkpoints)[0].glob("*/*.safetensors")
            for name, tensor in load_file(file).items()
        }


def wait_until(condition: Callable[[], Any], what: str, pause_s: float = 0.02) -> float:
    """Wait for a condition and return how long that took; fail loudly where it does not come."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > PATIENCE_S:
            raise TimeoutError(f"no {what} in {PATIENCE_S:g} s")
        time.sleep(pause_s)
    return time.monotonic() - started


def alive(pid: int) -> bool:
    """Say whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_moment(run: Run, moment: str, dice: random.Random) -> None:
    """Return at a random instant of the chosen kind, or when the run is over."""
    before = set(committed(run.checkpoints))
    signs: dict[str, Callable[[], bool]] = {
        "any": lambda: True,
        "writing": lambda: any(run.checkpoints.glob(".step-*.tmp-*")),
        "committed": lambda: bool(set(committed(run.checkpoints)) - before),
        "retention": lambda: any(run.checkpoints.glob(".step-*.rm-*")),
    }
    wait_until(lambda: signs[moment]() or run.done(), f"moment {moment!r}", 0.0005)
    time.sleep(dice.uniform(0, MOMENTS[moment][0]))


def phase_on_disk(run: Run) -> str:
    """Name the phase of saving that the files show."""
    names = [path.name for path in run.checkpoints.iterdir()] if run.checkpoints.exists() else []
    if any(".rm-" in name for name in names):
        return "retention"
    if hidden := list(run.checkpoints.glob(".step-*.tmp-*")):
        parts = sum(1 for _ in hidden[0].rglob("*.safetensors"))
        return f"writing, {parts} of 4 tensor files there"
    newest = committed(run.checkpoints)
    if newest and (run.checkpoints / "LATEST").exists():
        step = int(newest[0].name.removeprefix("step-"))
        return (
            "saved" if (run.checkpoints / "LATEST").read_text() == f"{step}\n" else "committed, LATEST behind"
        )
    return "committed, LATEST behind" if newest else "before the first checkpoint"


def damage_newest(run: Run, dice: random.Random) -> str:
    """Cut a file of the newest checkpoint short or flip one of its bits, where an older good one is left."""
    good = [path for path in committed(run.checkpoints) if not verify(path)]
    if len(good) < 2 or dice.random() < 0.4:
        return ""
    path = dice.choice(files_of(good[0]))
    kind = dice.choice(["cut short", "bit flipped"])
    if kind == "cut short":
        cut_short(path)
    else:
        flip_bit(path, dice.randrange(8 * path.stat().st_size))
    return kind if verify(good[0]) else ""  # a blank turned into a tab harms nothing


def strike(run: Run, dice: random.Random) -> dict[str, Any] | None:
    """Kill one process, see what is left and that the right step is taken; None where the run ended first."""
    moment = dice.choices(list(MOMENTS), [weight for _, weight in MOMENTS.values()])[0]
    wait_for_moment(run, moment, dice)
    workers = run.workers()
    victims = {"launcher": run.launcher.pid} | {f"rank {rank}": pid for rank, pid in workers.items()}
    if run.done():
        return None
    victim = dice.choice(sorted(victims))
    resumes = len(run.resumed())
    ended = not alive(victims[victim])  # by itself; its launcher may have yet to see it
    killed = time.monotonic()
    try:
        os.kill(victims[victim], signal.SIGKILL)
    except ProcessLookupError:
        ended = True
    if ended:
        return strike(run, dice)
    phase = phase_on_disk(run)
    wait_until(lambda: not any(alive(pid) for pid in workers.values()), "end of the survivors")
    event: dict[str, Any] = {"moment": moment, "victim": victim, "phase": phase, "damage": ""}
    event["survivors_gone_s"] = time.monotonic() - killed
    if victim == "launcher":
        run.launcher.end()
        event["damage"] = damage_newest(run, dice)
    event["expected"] = run.newest_good()  # new ranks need seconds until they look
    if victim == "launcher":
        killed = time.monotonic()
        run.start()
    event["taken"] = see_resume(run, event["expected"], resumes)
    event["kill_to_next_step_s"] = time.monotonic() - killed
    if event["taken"] != event["expected"]:
        raise AssertionError(f"the newest good checkpoint was not taken: {event}")
    return event


def see_resume(run: Run, expected: str | None, resumes: int) -> str | None:
    """Wait for the next step and return the checkpoint it was made from."""
    start = 0 if expected is None else int(expected.removeprefix("step-"))
    if expected is None:
        metrics = run.folder / "metrics.jsonl"
        size = metrics.stat().st_mtime_ns if metrics.exists() else 0
        wait_until(
            lambda: run.done() or (metrics.exists() and metrics.stat().st_mtime_ns != size), "first step"
        )
        return None if len(run.resumed()) == resumes else run.resumed()[-1]
    wait_until(lambda: run.done() or len(run.resumed()) > resumes, "resume")
    wait_until(lambda: run.done() or run.last_step() > start, "next step")
    return run.resumed()[-1]


def storm(
    kills: int, seed: int, folder: Path, *, limit_s: float = 1e9, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Strike `kills` times over as many runs as it takes; compare each with an undisturbed one.

    After `limit_s` seconds no further strike is begun.
    """
    dice = random.Random(seed)
    started = time.monotonic()
    data = random_dataset(folder / "data")
    undisturbed = Run(folder / "undisturbed", data)
    wait_until(undisturbed.done, "end of the undisturbed run")
    events: list[dict[str, Any]] = []

    def striking() -> bool:
        return len(events) < kills and time.monotonic() - started < limit_s

    for number in itertools.count(1):
        run = Run(folder / f"run-{number}", data)
        try:
            while striking() and (event := strike(run, dice)) is not None:
                events.append(event)
                say(f"{len(events):4d} {event}")
            wait_until(run.done, "end of the run")
        finally:
            run.launcher.send_signal(signal.SIGTERM)
        assert run.digests() == undisturbed.digests(), f"{run.folder}: the final tensors differ"
        if not striking():
            return summary(events, number, seed, time.monotonic() - started)
    raise AssertionError("unreachable")


def summary(events: list[dict[str, Any]], finished: int, seed: int, took_s: float) -> dict[str, Any]:
    """Return the record: what was done to the runs, and what came of it."""

    def spread(key: str, of: list[dict[str, Any]]) -> dict[str, float]:
        values = [event[key] for event in of]
        return {"median": round(statistics.median(values), 2), "max": round(max(values), 2)} if values else {}

    of_ranks = [event for event in events if event["victim"] != "launcher"]
    of_launchers = [event for event in events if event["victim"] == "launcher"]
    return {
        "kills": len(events),
        "resumes_that_took_another_than_the_newest_good_step": 0,  # storm() ends at the first
        "runs_finished_bit_equal": finished,
        "victims": dict(sorted(Counter(event["victim"] for event in events).items())),
        "phases_at_the_kill": dict(sorted(Counter(event["phase"] for event in events).items())),
        "damaged_newest_checkpoint": dict(Counter(event["damage"] for event in events if event["damage"])),
        "ranks_gone_after_kill_of_a_rank_s": spread("survivors_gone_s", of_ranks),
        "ranks_gone_after_kill_of_the_launcher_s": spread("survivors_gone_s", of_launchers),
        "rank_kill_to_next_step_s": spread("kill_to_next_step_s", of_ranks),
        "seed": seed,
        "took_s": round(took_s, 1),
        "options": OPTIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no strike after this many seconds")
    parser.add_argument("--record", type=Path, default=RECORDS / "kill_storm.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-storm-") as folder:
        record = storm(
            given.kills,
            given.seed,
            Path(folder),
            limit_s=given.limit_s,
            say=lambda line: print(line, flush=True),
        )
    write_record(given.record.stem, record, given.record.parent)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
