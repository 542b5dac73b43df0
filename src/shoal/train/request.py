"""What the user asked for when a run starts: configuration, folders, and what it begins from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config import rules
from shoal.config.layout import Layout, resolve_layout
from shoal.config.load import config_from_toml, differences
from shoal.config.sections import Config
from shoal.config.sync_rules import check_sync
from shoal.errors import ConfigError, InputError, counted
from shoal.models.shape import resolve_shape
from shoal.runtime.files import write_json
from shoal.runtime.rank_info import ReplicaGroupInfo
from shoal.tasks.choose import open_task
from shoal.tasks.task import Task
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
# Of a decoder's, these decide which weights it has, and what they mean.
_SHAPE = (
    *("style", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "max_seq_len"),
    *("vocab_size", "tie_embeddings"),
)


def plan_path(run_dir: Path) -> Path:
    """Return the file of a run's plan."""
    return run_dir / "plan.json"


@dataclass(frozen=True)
class Request:
    """One `shoal train` command, resolved."""

    config: Config
    run_dir: Path
    init: Path | None = None
    init_optimizer: bool = False
    layout: Layout | None = None  # where it was given in words
    replica_group: ReplicaGroupInfo | None = None  # where this is one of several replicas that train apart
    verbose: bool = False  # details are shown on the screen too
    plan: dict[str, Any] | None = None  # what was predicted, for the run folder

    def on(self, group: ReplicaGroupInfo) -> Request:
        """Return what is asked of one of the replicas that train apart."""
        layout = self.layout and self.layout.as_replica_group()
        return replace(self, run_dir=group.folder(self.run_dir), layout=layout, replica_group=group)

    def store_plan(self) -> None:
        """Write what was predicted into the run folder; that of an earlier start goes."""
        if self.plan is None:
            plan_path(self.run_dir).unlink(missing_ok=True)
        else:
            write_json(plan_path(self.run_dir), self.plan)

    @property
    def run_of_first(self) -> Path:
        """The run folder of the first replica."""
        return self.run_dir.parents[1] if self.replica_group and self.replica_group.replica else self.run_dir

    def resolve_layout(self, world_size: int) -> Layout:
        """Lay this world out; other replicas that train apart are counted, too."""
        layout = resolve_layout(self.config.parallel, world_size)
        group = self.replica_group
        return replace(layout, replica_groups=group.num_replicas) if group else layout

    def check(self, world_size: int) -> Task[Any, Any]:
        """Refuse what cannot work before any process starts; return what is trained."""
        if self.layout is not None and (wanted := self.layout.world_size) != world_size:
            raise ConfigError(
                f"--layout {self.layout} is for {counted(wanted, 'process')}, not for {world_size}",
                hint="leave --nproc out, or name a layout for that many",
            )
        layout = self.resolve_layout(world_size)
        rules.check(self.config, layout.batch_parts)
        require_sinks(self.config.train.sinks)
        task = open_task(self.config)
        check_sync(self.config, layout, task.num_blocks)
        task.check(layout)
        if self.init is not None and not self.init.exists():
            raise InputError(
                f"--init {self.init} does not exist",
                hint="give a run folder, a checkpoint or a Hugging Face folder",
            )
        if self.init_optimizer and self.init is None:
            raise InputError(
                "--init-optimizer needs --init CKPT", hint="name the checkpoint whose moments to keep"
            )
        return task


def refuse_other_run(config: Config, stored: str, checkpoint: Path) -> list[tuple[str, object, object]]:
    """Compare with the configuration of a checkpoint; return changed settings that a resume honours.

    A change of the model or of the data order is refused by name. What a described network consists of is
    compared by its layers, as its file may have moved.
    """
    changes = differences(config, config_from_toml(stored, f"{checkpoint}/config.toml"))
    moved = [("model.network", new, old) for name, new, old in changes if "decoder" not in (new, old)]
    refused = [change for change in changes if change[0].startswith(_FIXED) and change not in moved]
    if refused:
        named = "; ".join(f"{name} was {old}, now {new}" for name, new, old in refused)
        from_here = "" if _other_shape(config, stored, checkpoint) else f" --init {checkpoint}"
        raise ConfigError(
            f"{checkpoint} belongs to another run: {named}",
            hint=f"change it back, or start a new run with --run-dir NEW{from_here}",
        )
    return [change for change in changes if change[0] != "data.datasets"]


def refuse_other_shape(config: Config, stored: str, checkpoint: Path) -> None:
    """Refuse weights that do not fit the model, by the settings in which a checkpoint's differ."""
    if other := _other_shape(config, stored, checkpoint):
        named = "; ".join(f"model.{name} is {theirs} there, {ours} here" for name, ours, theirs in other)
        settings = ", ".join(f"model.{name} = {theirs}" for name, _, theirs in other)
        raise ConfigError(
            f"--init {checkpoint} has the weights of another model: {named}",
            hint=f"use {settings}, or leave --init out",
        )


def _other_shape(config: Config, stored: str, checkpoint: Path) -> list[tuple[str, object, object]]:
    """List (name, ours, a checkpoint's) for what decides the weights of a decoder and differs."""
    models = [config.model, config_from_toml(stored, f"{checkpoint}/config.toml").model]
    if any(model.network != "decoder" for model in models):
        return []
    ours, theirs = (resolve_shape(model, model.vocab_size) for model in models)
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in _SHAPE)
    any_length = ours.style == "llama"  # RoPE has no weights
    return [pair for pair in pairs if pair[1] != pair[2] and not (any_length and pair[0] == "max_seq_len")]
