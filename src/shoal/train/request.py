"""What the user asked for when a run starts: configuration, folders, and what it begins from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.config import rules
from shoal.config.layout import Layout, resolve_layout
from shoal.config.layout_rules import check_layout
from shoal.config.load import config_from_toml, differences
from shoal.config.sections import Config
from shoal.config.sync_rules import check_sync
from shoal.data.dataset import Dataset, open_dataset
from shoal.errors import ConfigError, DataError, InputError
from shoal.models.shape import resolve_shape
from shoal.train.sinks import require_sinks

# A run cannot go on when one of these changes: the model, or which samples a step holds.
_FIXED = (
    "model.",
    "data.weights",
    "data.reset_documents",
    "train.seed",
    "train.seq_len",
    "train.global_batch_size",
    "optimizer.name",
)


@dataclass(frozen=True)
class Request:
    """One `shoal train` command, resolved."""

    config: Config
    run_dir: Path
    init: Path | None = None
    init_optimizer: bool = False
    layout: Layout | None = None  # where it was given in words

    def open_datasets(self) -> list[Dataset]:
        """Open the datasets; refuse none, and several with different tokenizers."""
        if not self.config.data.datasets:
            raise ConfigError(
                "no dataset given",
                hint="make one with `shoal prepare TEXT --output DIR`, then add --data DIR",
            )
        datasets = [open_dataset(Path(path)) for path in self.config.data.datasets]
        first = datasets[0]
        for other in datasets[1:]:
            if (other.vocab_size, other.eod_id) != (first.vocab_size, first.eod_id):
                raise DataError(
                    f"{first.path} has {first.vocab_size} token ids and {other.path} has {other.vocab_size}: "
                    "datasets that are mixed need the same tokenizer",
                    hint=f"prepare {other.path} with --tokenizer {first.tokenizer_path}",
                )
        return datasets

    def check(self, world_size: int) -> list[Dataset]:
        """Refuse what cannot work before any process starts; return the datasets."""
        if self.layout is not None and (wanted := self.layout.world_size) != world_size:
            raise ConfigError(
                f"--layout {self.layout} is for {wanted} process(es), and there are {world_size}",
                hint="leave --nproc out, or name a layout for that many",
            )
        layout = resolve_layout(self.config.parallel, world_size)
        rules.check(self.config, layout.dp)
        check_sync(self.config, layout)
        require_sinks(self.config.train.sinks)
        datasets = self.open_datasets()
        check_layout(self.config, layout, resolve_shape(self.config.model, datasets[0].vocab_size))
        if self.init is not None and not self.init.exists():
            raise InputError(
                f"--init {self.init} does not exist", hint="give a run folder or a checkpoint folder"
            )
        if self.init_optimizer and self.init is None:
            raise InputError(
                "--init-optimizer needs --init CKPT", hint="name the checkpoint whose moments to keep"
            )
        return datasets


def refuse_other_run(config: Config, stored: str, checkpoint: Path) -> list[tuple[str, object, object]]:
    """Compare with the configuration of a checkpoint; return changed settings that a resume honours.

    A change of the model or of the data order is refused by name.
    """
    changes = differences(config, config_from_toml(stored, f"{checkpoint}/config.toml"))
    refused = [change for change in changes if change[0].startswith(_FIXED)]
    if refused:
        named = "; ".join(f"{name} was {old}, now {new}" for name, new, old in refused)
        raise ConfigError(
            f"{checkpoint} belongs to another run: {named}",
            hint=f"restore the setting, or start a new run with --run-dir NEW --init {checkpoint}",
        )
    return [change for change in changes if change[0] != "data.datasets"]
