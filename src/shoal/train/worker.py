"""One rank of a training job, from joining the others to its exit status."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from shoal.config.load import to_toml
from shoal.config.rules import hang_limit_s
from shoal.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, InputError, ShoalError
from shoal.runtime import process as processes
from shoal.runtime.failure import record_failure
from shoal.runtime.files import write_text
from shoal.runtime.log import log, quieten_libraries, show_progress, to_rank_file
from shoal.runtime.memory import is_out_of_memory, memory_use
from shoal.runtime.network import differing
from shoal.runtime.rank_info import RankInfo, launched_by_us, launcher_pid, read_rank_info
from shoal.runtime.run_folder import in_sentences
from shoal.runtime.startup import all_is_loaded
from shoal.runtime.stop import Stop, end_with_launcher, stopped_marker
from shoal.tasks.choose import open_task
from shoal.train.job import build_job
from shoal.train.loop import train
from shoal.train.request import Request, plan_path
from shoal.train.summary import print_summary


def run(request: Request) -> int:
    """Train as one rank and return shoal's exit status. Called on every rank."""
    if (launcher := launcher_pid()) is not None:
        end_with_launcher(launcher)
    all_is_loaded()
    info = read_rank_info() or RankInfo()
    quieten_libraries()
    try:
        with in_sentences(request.run_dir, lasting=True):
            to_rank_file(request.run_dir, info.rank, info.attempt, verbose=request.verbose)
            done = _train(request)
    except BaseException as error:
        show_progress("")
        record_failure(request.run_dir, info.rank, info.attempt, error)
        if info.world_size == 1 and not launched_by_us():
            raise
        _leave_at_once(error, quiet=launched_by_us() and info.rank == 0)
    if done:
        return EXIT_DONE
    # An agent takes any other status for a failure and starts the rank again; our launcher reads the marker.
    return EXIT_DONE if info.world_size > 1 or launched_by_us() else EXIT_STOPPED


def _train(request: Request) -> bool:
    runtime = request.config.runtime
    process = processes.join(runtime, request.run_dir)
    if not launched_by_us() and process.world_size > 1:
        from shoal.diagnosis.watch import watch_from_within  # else the launcher watches

        watch_from_within(process.info, request.run_dir, hang_limit_s(runtime))
    if process.info.is_on_several_hosts:
        _compare_hosts(request, process)
    stop = Stop(process, request.run_dir, runtime, launched=launched_by_us())
    stop.listen()
    if process.rank == 0 and not launched_by_us():
        request.store_plan()
    with _planned(request, process) as grade:
        job = build_job(request, process, stop)
        if process.rank == 0:
            stopped_marker(request.run_dir).unlink(missing_ok=True)  # of an earlier start
            write_text(request.run_dir / "config.toml", to_toml(job.config))
            job.metrics.grade = grade
            if process.info.attempt == 0:
                print_summary(job)
        done = train(job)
    if not done and process.info.local_rank == 0:  # each host has a launcher that looks for it
        stopped_marker(request.run_dir).touch()
    processes.leave()
    return done


@contextmanager
def _planned(
    request: Request, process: processes.Process
) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Yield what compares the first steps with the plan; where memory runs out, say what was planned.

    No error in either ends a run, or hides the error that did.
    """
    device, run_dir = process.device, request.run_dir
    before = memory_use(device).allocated_bytes

    def of_plan(words: Callable[[Any, dict[str, int]], str]) -> str:
        if not plan_path(run_dir).exists():
            return ""
        use = memory_use(device)
        measured = asdict(use) if device.is_cuda else {"reserved_bytes": use.allocated_bytes - before}
        try:
            from shoal.plan import grading

            return words(grading, measured)
        except Exception as error:
            return f"warning: {plan_path(run_dir)} is not compared: {type(error).__name__}: {error}"

    def grade(lines: list[dict[str, Any]]) -> None:
        if told := of_plan(lambda grading, measured: grading.grade(run_dir, lines, measured)):
            log.info(told)

    try:
        yield grade
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            told = of_plan(lambda grading, measured: grading.out_of_memory(run_dir, process.rank, measured))
            if told:
                error.add_note(told)  # below the traceback, of any rank
        raise


def _compare_hosts(request: Request, process: processes.Process) -> None:
    """Refuse to train where hosts differ in versions, settings or data. Collective over the world."""
    facts = {name: importlib.metadata.version(name) for name in ("shoal", "torch")}
    facts["python"] = platform.python_version()
    facts |= {
        f"dataset {number}": data.fingerprint
        for number, data in enumerate(open_task(request.config).data.datasets)
    }
    for section, settings in request.config:
        if section != "runtime":
            facts |= {f"{section}.{name}": str(value) for name, value in settings if name != "datasets"}
    here = (f"{socket.gethostname()} (rank {process.rank})", facts) if process.info.local_rank == 0 else None
    told: list[tuple[str, dict[str, str]] | None] = [None] * process.world_size
    dist.all_gather_object(told, here, group=process.control)
    if problems := differing(dict(filter(None, told))):
        raise InputError(
            f"the hosts are not alike: {'; '.join(problems)}",
            hint="give every host the same command, installation and data",
        )


def _leave_at_once(error: BaseException, *, quiet: bool) -> None:
    """End this rank without waiting for threads or groups that may hang with a dead peer.

    Our launcher tells the first cause itself, so rank 0, which shares its screen, stays quiet.
    """
    if not quiet:
        text = (
            f"error: {error}\n"
            if isinstance(error, ShoalError)
            else "".join(traceback.format_exception(error))
        )
        sys.stderr.write(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, ShoalError) else EXIT_FAILED)
