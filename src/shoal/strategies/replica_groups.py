"""Launcher of replica groups, which restarts each one that is lost.

A replica group is an ordinary `shoal train` with the processes of one replica. The first one uses the run's
folder, the others RUN/replicas/N with their screen output in a file there. Each gets its number, and the
address of the store in which quorums are formed, in a variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch

from shoal.config.sync_rules import strategy_of
from shoal.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ConfigError, counted
from shoal.launch import forking
from shoal.launch.membership import Membership
from shoal.launch.rendezvous import RUN_AGAIN, connect, open_store
from shoal.runtime import network
from shoal.runtime.cores import physical_cores
from shoal.runtime.failure import Failure, first_cause
from shoal.runtime.log import log, quieten_libraries, rank_folder
from shoal.runtime.network import Endpoint
from shoal.runtime.rank_info import ReplicaGroupInfo, group_folder
from shoal.runtime.startup import REPLICA_GROUP, SIGNALS, all_is_loaded
from shoal.runtime.stop import STARTED
from shoal.train.request import Request

LOST_S = 10.0  # silence after which a replica group is left out
BEAT_S = 0.5
_PERIOD_S = 0.1
_AGAIN_S = 2.0  # wait before a restart: the workers of a killed launcher take a moment to end


def status_keys(num_replicas: int) -> list[str]:
    """Return the keys of the heartbeats of replica groups."""
    return [f"status{replica}" for replica in range(num_replicas)]


def launch_groups(
    request: Request,
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int | None,
    endpoint: Endpoint | None,
) -> int:
    """Start the replica groups of this host; return shoal's exit status."""
    endpoint = endpoint or Endpoint()
    whole = request.resolve_layout(nproc * endpoint.nnodes)
    dispensable = strategy_of(request.config).kind == "outer"
    return ReplicaGroupLauncher(
        arguments,
        request.run_dir,
        num_replicas=whole.num_replicas,
        size=whole.as_replica_group().world_size,
        nproc=nproc,
        max_restarts=(3 if max_restarts is None else max_restarts) if dispensable else 0,
        endpoint=endpoint,
        timeout_s=request.config.runtime.timeout_s,
        without="the others go on without it" if dispensable else "the others end: it served them",
    ).run()


class ReplicaGroupLauncher:
    """Launcher of the replica groups of this host, each a child process in a session of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        run_dir: Path,
        *,
        num_replicas: int,
        size: int,
        nproc: int,
        max_restarts: int,
        endpoint: Endpoint,
        timeout_s: float,
        without: str,
    ) -> None:
        """Prepare nproc / size replicas, each `shoal ARGUMENTS`; host or connect to the store of `endpoint`.

        `without` is the text that tells what the others do when one is lost for good.
        """
        if nproc % size:
            raise ConfigError(
                f"--nproc {nproc} with replicas of {size} processes: one would be split over two hosts",
                hint=f"use --nproc {max(1, nproc // size) * size}",
            )
        self._arguments, self._run_dir = list(arguments), run_dir
        self._num_replicas, self._size, self._max_restarts = num_replicas, size, max_restarts
        self._without = without
        self._address = network.resolve(endpoint.host, endpoint.port)
        if endpoint.nnodes > 1:
            network.refuse_loopback(self._address, f"--rdzv {endpoint.host}:{endpoint.port}")
        self._hosting = endpoint.is_host(self._address)
        self._store = open_store(endpoint, self._address, timeout_s)
        self._node = 0 if self._hosting else endpoint.node or int(self._store.add("nodes", 1))
        self._here = range(self._node * (nproc // size), (self._node + 1) * (nproc // size))
        if self._here.stop > num_replicas:
            raise ConfigError(
                f"node {self._node} would have replicas {self._here.start} to {self._here.stop - 1} "
                f"of {num_replicas}",
                hint="give each host its own --node-rank, from 0, also when it comes back",
            )
        self._children: dict[int, forking.Child | subprocess.Popen[bytes]] = {}
        self._statuses: dict[int, int] = {}
        self._restarts = dict.fromkeys(self._here, 0)
        self._due = dict.fromkeys(self._here, 0.0)  # replica -> when to start or restart it
        self._asked = self._stopping = False  # a signal came; all are being stopped
        self._began = time.time()

    def run(self) -> int:
        """Start all, restart those that are lost, and return shoal's exit status when all have ended."""
        quieten_libraries()
        all_is_loaded()
        log.info(
            f"{self._num_replicas} replicas of {counted(self._size, 'process')} meet at {self._address}:"
            f"{self._store.port}; here: {', '.join(map(str, self._here))}; output of replicas "
            f"other than 0: {self._run_dir / 'replicas'}"
        )
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        while self._children or self._due:
            if self._asked and not self._stopping:
                self._stop()
            for replica, child in list(self._children.items()):
                if (code := child.poll()) is not None:
                    del self._children[replica]
                    self._on_end(replica, code)
            for replica in [r for r, when in self._due.items() if time.monotonic() > when]:
                del self._due[replica]
                self._start(replica)
            time.sleep(_PERIOD_S)
        self._wait_for_other_hosts()
        return self._status()

    def _start(self, replica: int) -> None:
        folder = group_folder(self._run_dir, replica)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._size):
            (rank_folder(folder, rank) / "error.json").unlink(missing_ok=True)  # of an earlier start
        group = ReplicaGroupInfo(
            replica,
            self._num_replicas,
            self._size,
            self._address,
            self._store.port,
            uuid.uuid4().hex,
            os.getpid(),
        )
        told = {REPLICA_GROUP: json.dumps(asdict(group)), STARTED: str(self._began)}
        env = {**os.environ, **told, **self._share(replica)}
        with contextlib.ExitStack() as stack:
            screen = stack.enter_context((folder / "screen").open("ab")).fileno() if replica else None
            self._children[replica] = forking.start(self._arguments, env, screen or 1, screen or 2)

    def _share(self, replica: int) -> dict[str, str]:
        """Return the variables that give a replica group its share of this host's cores and GPUs."""
        workers = len(self._here) * self._size
        share = {"OMP_NUM_THREADS": str(max(1, physical_cores() // workers))}
        share |= {name: os.environ[name] for name in share.keys() & os.environ.keys()}  # set by the user
        count = torch.cuda.device_count()
        if count >= self._size:
            named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            devices = named.split(",") if named else [str(device) for device in range(count)]
            first = (replica - self._here.start) * self._size
            own = [devices[(first + number) % len(devices)] for number in range(self._size)]
            share["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            if count < workers:
                log.info(
                    f"replica {replica} shares GPU {', '.join(own)}; this host has {count} for {workers} "
                    "processes"
                )
        return share

    def _on_end(self, replica: int, code: int) -> None:
        if self._stopping and code in (-signal.SIGTERM, 128 + signal.SIGTERM):
            code = EXIT_STOPPED  # before its first step: its last checkpoint is kept
        if code in (EXIT_DONE, EXIT_STOPPED):
            self._statuses[replica] = code
            return
        failure = self._failure(replica, code)
        again = not (failure.fatal or self._stopping) and self._restarts[replica] < self._max_restarts
        told, then = "restarting" if again else "lost", self._without
        try:
            self._store.set(status_keys(self._num_replicas)[replica], json.dumps({"state": told}))
        except RuntimeError:
            again, then = False, f"the store at {self._address} is gone, and node 0 with it: {RUN_AGAIN}"
        if again:
            self._restarts[replica] += 1
            self._due[replica] = time.monotonic() + _AGAIN_S
            then = f"starting it again (restart {self._restarts[replica]} of {self._max_restarts})"
        else:
            self._statuses[replica] = failure.exit_code
        log.warning(f"replica {replica} is lost: {failure.sentence}\n  {then}")

    def _failure(self, replica: int, code: int) -> Failure:
        """Return why a replica group ended, from the errors that its ranks have recorded."""
        folder = group_folder(self._run_dir, replica)
        told = [rank for rank in range(self._size) if (rank_folder(folder, rank) / "error.json").exists()]
        return first_cause(folder, 0, dict.fromkeys(told if told and code > 0 else [0], code))

    def _wait_for_other_hosts(self) -> None:
        """Keep the store until the replica groups of all hosts have finished or are silent."""
        others = [replica for replica in range(self._num_replicas) if replica not in self._here]
        if not self._hosting or not others:
            return
        address, port, keys = self._address, self._store.port, status_keys(self._num_replicas)
        members = Membership(lambda: connect(address, port), keys, None, {}, BEAT_S)
        members.start()
        until = time.monotonic() + LOST_S
        while time.monotonic() < until or any(
            members.told.get(replica, {}).get("state") in ("joining", "training")
            and members.silent_s(replica) < LOST_S
            for replica in others
        ):
            if all(members.told.get(replica, {}).get("state") in ("done", "lost") for replica in others):
                break
            time.sleep(_PERIOD_S)
        members.leave(LOST_S)

    def _status(self) -> int:
        """Return the status of the first replica group, or if it is lost, of the first that is not."""
        statuses = [self._statuses[replica] for replica in self._here]
        lost = [replica for replica in self._here if self._statuses[replica] not in (EXIT_DONE, EXIT_STOPPED)]
        living = [replica for replica in self._here if replica not in lost]
        if lost and living:
            where = group_folder(self._run_dir, living[0])
            log.warning(f"lost: replica {', '.join(map(str, lost))}; the result is in {where}")
        if not living:
            return statuses[0] if statuses else EXIT_FAILED
        return self._statuses[living[0]]

    def _stop(self) -> None:
        """Ask all replica groups to save and end, and start no more."""
        self._stopping = True
        self._statuses |= dict.fromkeys(self._due, EXIT_STOPPED)  # their last checkpoints are kept
        self._due.clear()
        self._signal(signal.SIGTERM)
        log.info("\nall replicas finish their step and save; press Ctrl-C again to stop immediately")

    def _signal(self, number: signal.Signals) -> None:
        for child in list(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a stop request, as a child may just be starting. A second signal ends all at once."""
        if self._asked:
            self._signal(signal.SIGKILL)
            os._exit(128 + number)
        self._asked = True
