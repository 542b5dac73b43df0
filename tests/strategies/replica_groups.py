"""Replicas that train apart as threads of one process, with the real store, quorums and transfers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config.sections import Optimizer, Sync
from shoal.gradsync.replicas import Update
from shoal.runtime.rank_info import ReplicaGroupInfo
from shoal.strategies.quorum import QuorumClient
from shoal.strategies.rounds import OuterRounds
from shoal.train.optimiser import build_optimiser, optimiser_tensors


class Sea:
    """A store, and replica groups in it."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._clients: list[QuorumClient] = []
        self.rounds: list[dict[str, Any]] = []  # what the first replica group recorded

    def group(self, replica: int) -> ReplicaGroupInfo:
        return ReplicaGroupInfo(replica, self.replicas, 1, "127.0.0.1", self.store.port, uuid.uuid4().hex, 0)

    def client(self, replica: int, plan: str = "", patience_s: float = 20, **options: Any) -> QuorumClient:
        self._clients.append(QuorumClient(self.group(replica), 0, plan, patience_s, **options))
        return self._clients[-1]

    def close(self) -> None:
        """End all threads, before the store goes."""
        for client in self._clients:
            client.leave()

    def sync(
        self,
        replica: int,
        weights: dict[str, nn.Parameter],
        steps: int,
        settings: Sync,
        rate_at: Callable[[int], float] = lambda step: 1.0,
        inner: Update | None = None,
    ) -> OuterRounds:
        """Return what the trainer has take its steps; `inner` is needed in warm-up."""

        def record(step: int, **facts: Any) -> None:
            if replica == 0:
                self.rounds.append({"step": step, **facts})

        quorum = self.client(replica) if self.replicas > 1 else None
        return OuterRounds(
            weights,
            settings,
            steps=steps,
            rate_at=rate_at,
            inner=inner or Update(lambda rate: None, dict),
            num_replicas=self.replicas,
            quorum=quorum,
            record=record,
            incidents=None,
        )


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` for each replica group at once, and return what it gave."""
    with ThreadPoolExecutor(count) as threads:
        return [future.result(60) for future in [threads.submit(work, replica) for replica in range(count)]]


def sgd_of(weights: dict[str, nn.Parameter], momentum: float = 0.0) -> Update:
    """Return plain SGD."""
    optimiser = build_optimiser(weights, Optimizer(name="sgd", momentum=momentum, weight_decay=0.0))
    return Update(optimiser.step, lambda: optimiser_tensors(weights, optimiser))


def parameters(**values: Any) -> dict[str, nn.Parameter]:
    """Return float64 weights by name; __ stands for a dot."""
    return {
        name.replace("__", "."): nn.Parameter(torch.tensor(value, dtype=torch.float64))
        for name, value in values.items()
    }


@pytest.fixture
def sea() -> Iterator[Callable[[int], Sea]]:
    """Return a function that makes a sea of so many replica groups, and drain it after the test."""
    made: list[Sea] = []

    def make(replicas: int) -> Sea:
        made.append(Sea(replicas))
        return made[-1]

    yield make
    for one in made:
        one.close()
