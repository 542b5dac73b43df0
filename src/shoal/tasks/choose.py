"""Which task a configuration means."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.tasks.gpt import Gpt
from shoal.tasks.task import Task

_NETWORKS = "shoal.networks.task"  # loaded where another network than a decoder is trained


def open_task(config: Config) -> Task[Any, Any]:
    """Open the data and resolve the model of a configuration, without making it."""
    if not config.data.datasets:
        raise ConfigError(
            "no dataset given",
            hint="make one with `shoal prepare TEXT --output DIR`, then add --data DIR",
        )
    if config.model.network == "decoder":
        return Gpt(config)
    task: Task[Any, Any] = importlib.import_module(_NETWORKS).open_network(config)
    return task
