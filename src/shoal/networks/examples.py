"""Labelled examples as what a task is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.sections import Config
from shoal.data.examples import Examples, ExampleSet, Pair, open_examples
from shoal.data.loader import Loader
from shoal.errors import DataError


@dataclass(frozen=True)
class ExampleData:
    """Sets of examples of one shape, with the same classes and the same scale."""

    config: Config
    datasets: tuple[ExampleSet, ...]
    unit = "examples"
    sample = "example"

    def samples(self, split: str) -> Examples:
        """Return the examples of a split."""
        return Examples([dataset.split(split) for dataset in self.datasets])

    def without(self, split: str) -> str:
        """Say why a split has no sample."""
        return "the split holds no example"

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's state says of the data."""
        first = self.datasets[0]
        return {
            "shape": list(first.shape),
            "num_classes": first.num_classes,
            "dtype": first.split("train")[0].dtype.name,
            "mean": first.mean,
            "std": first.std,
        }

    def files(self) -> dict[str, bytes]:
        """Return nothing: the state says all."""
        return {}

    def refuse_other(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Raise a DataError where a checkpoint was trained on inputs or classes of another form."""
        for name in ("shape", "num_classes"):
            if state[name] != self.facts()[name]:
                raise DataError(
                    f"{checkpoint} was trained with {name} = {state[name]}; the data has {self.facts()[name]}"
                )

    def rows(self, loader: Loader[Pair]) -> list[tuple[str, str]]:
        """Say how long an epoch, a step and the run are."""
        train, per_epoch = self.config.train, loader.steps_per_epoch
        return [
            ("epoch", f"{loader.total:,} examples = {per_epoch:,.1f} steps"),
            ("step", f"{train.global_batch_size} examples"),
            ("in all", f"{train.steps:,} steps = {train.steps / per_epoch:.2f} epochs"),
        ]


def open_example_sets(config: Config) -> ExampleData:
    """Open the datasets; refuse several that one network cannot take alike."""
    datasets = tuple(open_examples(Path(path)) for path in config.data.datasets)
    first = ExampleData(config, datasets[:1])
    for other in datasets[1:]:
        if (theirs := ExampleData(config, (other,)).facts()) != first.facts():
            raise DataError(
                f"{datasets[0].path} has {first.facts()} and {other.path} has {theirs}, "
                "and one network cannot take both",
                hint="prepare them together, as one dataset",
            )
    return ExampleData(config, datasets)
