"""Which task a configuration means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.tasks.classify import ClassifyExamples, ClassifyTokens
from shoal.tasks.gpt import Gpt
from shoal.tasks.task import Task

_TASKS: dict[str, Callable[[Config], Task[Any, Any]]] = {
    "decoder": Gpt,
    "fcn-r": ClassifyExamples,
    "lstm": ClassifyTokens,
}


def open_task(config: Config) -> Task[Any, Any]:
    """Open the data and resolve the model of a configuration, without making it."""
    if not config.data.datasets:
        raise ConfigError(
            "no dataset given",
            hint="make one with `shoal prepare TEXT --output DIR`, then add --data DIR",
        )
    return _TASKS[config.model.network](config)
