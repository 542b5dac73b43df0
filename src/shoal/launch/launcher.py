"""Start N local workers under torch's elastic agent, restart them after a failure, and say what happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shoal.errors import EXIT_DONE, EXIT_STOPPED
from shoal.launch import forking
from shoal.launch.rendezvous import Rendezvous
from shoal.runtime.failure import Failure, first_cause
from shoal.runtime.flight_recorder import recorder_path
from shoal.runtime.log import log, quieten_libraries, show_progress
from shoal.runtime.network import Endpoint
from shoal.runtime.startup import LAUNCHED, SIGNALS, all_is_loaded
from shoal.runtime.stop import STARTED, stop_marker, stopped_marker

if TYPE_CHECKING:
    from shoal.diagnosis.watch import Watch

_MONITOR_S = 0.1
_GRACE_S = 5  # for ranks to leave after a peer was lost


def launch(
    arguments: list[str],
    nproc: int,
    run_dir: Path,
    max_restarts: int,
    hang_s: float,
    rendezvous: Rendezvous | None = None,
) -> int:
    """Run `shoal ARGUMENTS` as nproc workers on this host; return shoal's exit status.

    Workers that make no progress for `hang_s` seconds are ended, with a verdict. `rendezvous` joins them to
    the workers of other hosts, whose launchers meet there too.
    """
    quieten_libraries()
    all_is_loaded()
    for marker in (stop_marker(run_dir), stopped_marker(run_dir)):
        marker.unlink(missing_ok=True)
    stop_marker(run_dir).parent.mkdir(parents=True, exist_ok=True)
    os.environ[LAUNCHED] = str(os.getpid())  # inherited by the workers
    os.environ.setdefault(STARTED, str(time.time()))
    rendezvous = rendezvous or Rendezvous(Endpoint(), nproc, timeout_s=0)
    spec = WorkerSpec(
        role="train",
        local_world_size=nproc,
        rdzv_handler=rendezvous,
        entrypoint="shoal",
        args=tuple(arguments),
        max_restarts=max_restarts,
        monitor_interval=_MONITOR_S,
    )
    agent = _Agent(spec, run_dir, hang_s, rendezvous)
    agent.listen()
    # The agent would otherwise install handlers that end the workers without a save.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    result = agent.run()
    if result.is_failed():
        return agent.report_end()
    return EXIT_STOPPED if stopped_marker(run_dir).exists() else EXIT_DONE


class _Agent(LocalElasticAgent):
    """torch's agent, which also tells the user of failures and passes stop requests on.

    The overridden or read underscore names are the extension points of SimpleElasticAgent, as seen on
    torch 2.11 to 2.13.
    """

    def __init__(self, spec: WorkerSpec, run_dir: Path, hang_s: float, rendezvous: Rendezvous) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        self._rendezvous_of_hosts = rendezvous
        self._run_dir = run_dir
        self._hang_s = hang_s
        self._watch: Watch  # of this attempt
        self._pids: dict[int, int] = {}
        self._last_failure: Failure | None = None

    def listen(self) -> None:
        """Pass the user's signals on as a stop request."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def report_end(self) -> int:
        """Say last on the screen why the job failed; return its exit status."""
        assert self._last_failure is not None, "the agent failed without a failed worker"
        if stop_marker(self._run_dir).exists() and self._last_failure.secondary:
            log.info("stopped without saving; the last committed checkpoint, if any, is kept")
            return EXIT_STOPPED
        show_progress("")  # of a worker that had no time to remove it
        print(f"error: {self._last_failure}", file=sys.stderr)
        return self._last_failure.exit_code

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        from shoal.diagnosis.watch import Watch  # only launchers watch

        self._pids = {}  # of the last attempt: no longer ours to signal
        ranks = [worker.global_rank for worker in worker_group.workers]
        for rank in ranks:
            recorder_path(self._run_dir, rank).unlink(missing_ok=True)  # of an earlier start
        self._attempt = _Workers(worker_group, worker_group.spec.max_restarts - self._remaining_restarts)
        self._pcontext = self._attempt
        self._attempt.start()
        self._pids = self._attempt.pids()
        hosts = self._rendezvous_of_hosts
        self._watch = Watch(self._run_dir, ranks, self._hang_s, hosts.own_host, hosts.share)
        return self._pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and (
            self._rendezvous_of_hosts.disturbed() or self._watch.troubled()
        ):
            result = RunResult(WorkerState.FAILED)  # the workers here hang, or end with those of another host
        if result.is_failed():
            killed = {worker_group.workers[local].global_rank for local in self._attempt.killed}
            # A rank that the launcher itself killed is no cause: as if it had left when it was asked to.
            codes = {
                rank: -signal.SIGTERM if rank in killed else f.exitcode for rank, f in result.failures.items()
            }
            self._on_failure(codes)
        return result

    def _exit_barrier(self) -> None:
        self._rendezvous_of_hosts.finish()

    def _on_failure(self, exit_codes: dict[int, int]) -> None:
        restarts = self._worker_group.spec.max_restarts - self._remaining_restarts
        here = first_cause(self._run_dir, restarts, exit_codes) if exit_codes else None
        cause, failure = self._watch.explain(here, self._rendezvous_of_hosts.agree_on_cause)
        self._last_failure = failure
        if failure.fatal or stop_marker(self._run_dir).exists():
            self._remaining_restarts = 0
        if cause is None or cause.rank < 0:  # stopped ones hear no SIGTERM
            self._signal_workers(signal.SIGKILL)
        if self._remaining_restarts:
            log.info(f"\n{failure}")
            log.info(
                f"restarting all ranks from the last committed checkpoint "
                f"(restart {restarts + 1} of {self._worker_group.spec.max_restarts})"
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        marker = stop_marker(self._run_dir)
        if marker.exists():
            self._signal_workers(signal.SIGKILL)
            os._exit(128 + number)
        marker.write_text(signal.Signals(number).name)
        name = signal.Signals(number).name
        log.info(f"\n{name}: saving at the end of this step; press Ctrl-C again to stop immediately")
        self._signal_workers(signal.SIGTERM)

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class _Workers(SubprocessContext):
    """The workers of one attempt, forked where torch's own would start a Python for each."""

    killed: frozenset[int] = frozenset()  # local ranks that did not end when they were asked to

    def __init__(self, group: WorkerGroup, attempt: int) -> None:
        envs = {
            worker.local_rank: {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
                "MASTER_ADDR": str(group.master_addr),
                "MASTER_PORT": str(group.master_port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            }
            for worker in group.workers
        }
        arguments = dict.fromkeys(envs, group.spec.args)
        super().__init__("train", "shoal", arguments, envs, DefaultLogsSpecs(log_dir=os.devnull))
        self._tail_logs = []  # two threads a rank, that would follow what is written to os.devnull

    def _start(self) -> None:
        handlers: dict[int, Any] = self.subprocess_handlers
        for rank, env in self.envs.items():
            handlers[rank] = _Worker(forking.start(self.args[rank], os.environ | env))

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Ask the workers to end; kill those that have not after `_GRACE_S`, and wait until they are gone."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.close(death_sig)
        end = time.monotonic() + min(timeout, _GRACE_S)
        for handler in self.subprocess_handlers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, end - time.monotonic()))
        late = (rank for rank, handler in self.subprocess_handlers.items() if handler.proc.poll() is None)
        self.killed = self.killed | frozenset(late)
        super()._close(signal.SIGKILL, timeout)  # a GPU's memory may take long to be given back


class _Worker:
    """A worker as torch's agent handles it."""

    def __init__(self, proc: forking.Child | subprocess.Popen[bytes]) -> None:
        self.proc = proc

    def close(self, death_sig: signal.Signals) -> None:
        """End the worker and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig)
