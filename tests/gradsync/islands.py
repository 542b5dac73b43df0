"""Replicas that train apart as threads of one process, with the real store, meetings and transfers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config.sections import Sync
from shoal.gradsync.meeting import Meeting
from shoal.gradsync.rounds import OuterRounds
from shoal.runtime.seat import Island


class Sea:
    """A store, and islands in it."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._meetings: list[Meeting] = []
        self.rounds: list[dict[str, Any]] = []  # what the first island recorded

    def island(self, replica: int) -> Island:
        return Island(replica, self.replicas, 1, "127.0.0.1", self.store.port, uuid.uuid4().hex, 0)

    def meeting(self, replica: int, plan: str = "", patience_s: float = 20, **options: Any) -> Meeting:
        self._meetings.append(Meeting(self.island(replica), 0, plan, patience_s, **options))
        return self._meetings[-1]

    def close(self) -> None:
        """End all threads, before the store goes."""
        for meeting in self._meetings:
            meeting.leave()

    def sync(
        self,
        replica: int,
        weights: dict[str, nn.Parameter],
        steps: int,
        settings: Sync,
        rate_at: Callable[[int], float] = lambda step: 1.0,
        update: Callable[[int], None] = lambda step: None,
    ) -> OuterRounds:
        """Return what the trainer has take its steps, by `update` where they are taken together."""

        def record(step: int, **facts: Any) -> None:
            if replica == 0:
                self.rounds.append({"step": step, **facts})

        meeting = self.meeting(replica) if self.replicas > 1 else None
        return OuterRounds(
            weights,
            settings,
            steps=steps,
            rate_at=rate_at,
            update=update,
            replicas=self.replicas,
            meeting=meeting,
            record=record,
            incidents=None,
        )


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` for each island at once, and return what it gave."""
    with ThreadPoolExecutor(count) as threads:
        return [future.result(60) for future in [threads.submit(work, replica) for replica in range(count)]]


def sgd_of(weights: dict[str, nn.Parameter], momentum: float = 0.0) -> Callable[[float], None]:
    """Return what takes a step of plain SGD at a rate."""
    optimiser = torch.optim.SGD(weights.values(), momentum=momentum)

    def take(rate: float) -> None:
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()

    return take


def parameters(**values: Any) -> dict[str, nn.Parameter]:
    """Return float64 weights by name; __ stands for a dot."""
    return {
        name.replace("__", "."): nn.Parameter(torch.tensor(value, dtype=torch.float64))
        for name, value in values.items()
    }


@pytest.fixture
def sea() -> Iterator[Callable[[int], Sea]]:
    """Return a function that makes a sea of so many islands, and drain it after the test."""
    made: list[Sea] = []

    def make(replicas: int) -> Sea:
        made.append(Sea(replicas))
        return made[-1]

    yield make
    for one in made:
        one.close()
