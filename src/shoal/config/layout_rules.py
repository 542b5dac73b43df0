"""Which settings go together under a layout: one row a rule, each with its reason and what to choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from shoal.config.layout import Layout
from shoal.config.load import differences
from shoal.config.rules import grad_accum_steps
from shoal.config.sections import Config
from shoal.errors import ConfigError, counted


class Shape(Protocol):
    """What the rules ask of a resolved model."""

    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def padded_vocab_size(self) -> int: ...


Problem = tuple[str, str]  # what is wrong, with the values; what to choose
# Settings that networks of fixed form do not read, beside those of the section model.
_FOR_DECODERS = ("data.reset_documents", "train.recompute", "train.recompute_layers")
Rule = Callable[[Config, Layout, Shape], Iterator[Problem]]


def check_layout(config: Config, layout: Layout, shape: Shape | None) -> None:
    """Raise a ConfigError for the first rule that a layout breaks; without a shape the form is fixed."""
    if shape is None:
        for message, hint in _fixed_form(config, layout):
            raise ConfigError(message, hint=hint)
        return
    for rule in RULES:
        for message, hint in rule(config, layout, shape):
            raise ConfigError(message, hint=hint)


def cut_evenly(count: int, stages: int) -> list[int]:
    """Divide `count` layers among stages, the first ones larger: the last one also holds the head."""
    return [count // stages + (stage < count % stages) for stage in range(stages)]


def layers_of_stages(config: Config, layout: Layout, n_layers: int) -> list[range]:
    """Return the layers of each pipeline stage, in order."""
    sizes = list(config.parallel.split) or cut_evenly(n_layers, layout.stages)
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def check_tensor_cut(shape: Shape, tp: int) -> None:
    """Raise a ConfigError where a model cannot be cut over `tp` processes."""
    for message, hint in _cuts(shape, tp):
        raise ConfigError(message, hint=hint)


def _fixed_form(config: Config, layout: Layout) -> Iterator[Problem]:
    """Yield what goes with decoders only."""
    network = config.model.network
    read = ("model.network", "model.vocab_size", "model.batch_statistics")
    if layout.zero or layout.tp * layout.pp > 1:
        yield (
            f"model.network = {network} under {layout}: tp, pp and zero know how to cut decoders only",
            f"use replicas of the whole network, dp{layout.world_size}",
        )
    for name, value, default in differences(config, Config()):
        decoders = name.startswith("model.") and name not in read
        if decoders or name in _FOR_DECODERS:
            yield (
                f"{name} = {value} with model.network = {network}, which does not read it",
                f"leave it out ({name} = {default})",
            )
    if config.optimizer.name == "muon":
        yield (
            f"optimizer.name = muon with model.network = {network}: it updates a decoder's blocks",
            "use optimizer.name = adamw or sgd",
        )
    if config.train.compile == "on":
        yield (
            f"train.compile = on with model.network = {network}: only a decoder's blocks are compiled",
            "use train.compile = off (or auto)",
        )


def _tensor_cut(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    return _cuts(shape, layout.tp)


def _cuts(shape: Shape, tp: int) -> Iterator[Problem]:
    sizes = {
        "model.n_heads": (shape.n_heads, "attention is cut by heads"),
        "model.n_kv_heads": (shape.n_kv_heads, "key and value heads are cut with their queries"),
        "model.d_ff": (shape.d_ff, "the MLP is cut by its width"),
        "the padded vocabulary": (shape.padded_vocab_size, "embedding and head are cut by ids"),
    }
    fits = [n for n in range(1, shape.n_heads + 1) if not any(size % n for size, _ in sizes.values())]
    for name, (size, reason) in sizes.items():
        if size % tp:
            yield (
                f"{name} = {size} is not divisible by parallel.tp = {tp}: {reason}",
                f"use parallel.tp = {', '.join(map(str, fits))}",
            )


def _sequence(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    if not layout.sequence:
        return
    if layout.tp == 1:
        yield (
            "parallel.sequence = true with parallel.tp = 1: there is nobody to share the sequence with",
            "set parallel.tp to 2 or more, or parallel.sequence = false",
        )
    for name, length in (("train.seq_len", config.train.seq_len), ("eval.seq_len", config.eval.seq_len)):
        if length % layout.tp:
            yield (
                f"{name} = {length} is not divisible by parallel.tp = {layout.tp}: parallel.sequence cuts "
                "each sequence into that many parts",
                f"use {name} = {length // layout.tp * layout.tp or layout.tp}, or parallel.sequence = false",
            )


def _stages(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    split, stages = config.parallel.split, layout.stages
    if split and (len(split) != stages or sum(split) != shape.n_layers):
        even = ", ".join(map(str, cut_evenly(shape.n_layers, stages)))
        yield (
            f"parallel.split = {list(split)} names {counted(len(split), 'stage')} with "
            f"{counted(sum(split), 'layer')}; parallel.pp = {layout.pp} with schedule {layout.schedule} "
            f"needs {counted(stages, 'stage')} with model.n_layers = {shape.n_layers}",
            f"use parallel.split = [{even}], or leave it out",
        )
    if 0 in split or stages > shape.n_layers:
        yield (
            f"model.n_layers = {shape.n_layers} over {stages} pipeline stages leaves a stage without a layer",
            f"use parallel.pp = {max(1, shape.n_layers * layout.pp // stages)} or less, and at least one "
            "layer a stage",
        )


def _micro_batches(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    count = grad_accum_steps(config, layout.batch_parts)
    unit = layout.pp
    if layout.pp == 1:
        return
    if layout.schedule == "1f1b" and count < unit:
        problem = f"schedule 1f1b fills {unit} stages with {counted(count, 'micro-batch')}"
    elif layout.schedule in ("interleaved", "zero_bubble") and count % unit:
        problem = f"schedule {layout.schedule} takes micro-batches in rounds of {unit}, and there are {count}"
    else:
        return
    fitting = config.train.global_batch_size // (layout.batch_parts * unit)
    sizes = [n for n in range(1, fitting + 1) if fitting % n == 0]
    hint = (
        f"use train.micro_batch_size = {', '.join(map(str, sizes))}"
        if sizes
        else "use a larger global_batch_size"
    )
    yield (
        f"parallel.pp = {layout.pp}: {problem} (train.global_batch_size = {config.train.global_batch_size}, "
        f"micro_batch_size = {config.train.micro_batch_size}, "
        f"{counted(layout.batch_parts, 'data-parallel process')})",
        hint + ", or parallel.schedule = gpipe",
    )


def _zero_bubble(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    if layout.pp == 1 or layout.schedule != "zero_bubble":
        return
    if layout.zero:
        yield (
            f"parallel.schedule = zero_bubble with parallel.zero = {layout.zero}: torch's split backward "
            "does not run the hooks by which sharded gradients are kept, and they would be lost",
            "use parallel.schedule = 1f1b or interleaved, or parallel.zero = 0",
        )
    if config.train.recompute != "none":
        yield (
            f"parallel.schedule = zero_bubble with train.recompute = {config.train.recompute}: each of the "
            "two halves of a backward pass would compute everything again",
            "use parallel.schedule = 1f1b, or train.recompute = none",
        )


def _optimisers(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    if config.optimizer.name == "muon" and (layout.tp > 1 or layout.zero):
        yield (
            f"optimizer.name = muon under {layout}: its update needs whole matrices, and here each process "
            "has a part of them",
            "use optimizer.name = adamw, or only dp and pp",
        )


def _offload(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    if config.parallel.offload and not layout.zero:
        yield (
            "parallel.offload = true with parallel.zero = 0: only sharded state is kept in host memory",
            "set parallel.zero = 1, 2 or 3",
        )
    elif config.parallel.offload and layout.world_size != layout.dp_shard:
        yield (
            f"parallel.offload = true under {layout}: what other axes sum after the backward pass must lie "
            "on the GPUs",
            "use ZeRO over all processes, such as zero2x4, or parallel.offload = false",
        )


def _compile(config: Config, layout: Layout, shape: Shape) -> Iterator[Problem]:
    if config.train.compile == "on" and layout.pp > 1:
        yield (
            f"train.compile = on with parallel.pp = {layout.pp}: with torch 2.13, a pipeline's schedules cut "
            "each backward pass in ways that were not tried with compiled blocks",
            "use train.compile = off (or auto)",
        )


RULES: tuple[Rule, ...] = (
    _tensor_cut,
    _sequence,
    _stages,
    _micro_batches,
    _zero_bubble,
    _optimisers,
    _offload,
    _compile,
)
