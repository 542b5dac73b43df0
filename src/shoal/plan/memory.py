"""Memory of each rank by category over a step (no torch).

docs/planner.md has each formula with its source; `shoal.plan.simulate` checks them on the real model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.config.sync_rules import BUCKET_BYTES
from shoal.models.counts import count_parameters
from shoal.plan.activations import block_bytes, end_bytes
from shoal.plan.in_flight import in_flight
from shoal.plan.weights import Group, block_group, groups_of
from shoal.plan.workload import Workload

CATEGORIES = (
    "weights",
    "master_weights",
    "gradients",
    "optimizer",
    "layer_inputs",
    "activations",
    "logits",
    "communication",
    "pipeline",
    "offload",
    "reserve",
    "context",
)
_BETWEEN_STEPS = ("weights", "master_weights", "gradients", "optimizer", "pipeline")
_OUTSIDE = ("reserve", "context")  # beside what tensors take
# Of a 345M GPT-2 on a 24 GB GPU: 13,826 MiB reserved where 11,927 were allocated at the peak, and 15,107 in
# nvidia-smi (run of 2020, docs/planner.md).
_RESERVE = 13_826 / 11_927.47 - 1
_CONTEXT_BYTES = (15_107 - 13_826) << 20
_SCATTERS_IN_FLIGHT = {"cpu": 2, "cuda": 1}  # shoal.parallel.shard; FSDP2's own


@dataclass(frozen=True)
class Moment:
    """Bytes on the device at one moment of a step."""

    name: str
    bytes: dict[str, int]  # by category

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks at one place of the pipeline."""

    pp_rank: int
    moments: tuple[Moment, ...]  # the first is between steps
    host_bytes: int = 0  # sharded state and layer inputs that are kept in host memory

    @cached_property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def allocated(self) -> int:
        """Bytes of tensors between steps."""
        return _tensors(self.moments[0])

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak."""
        return _tensors(self.peak)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds at the peak."""
        return self.peak_bytes + self.peak.bytes["reserve"]

    @property
    def total_bytes(self) -> int:
        """Bytes of the device that are taken at the peak."""
        return self.peak.total


def _tensors(moment: Moment) -> int:
    return sum(size for category, size in moment.bytes.items() if category not in _OUTSIDE)


def memory_of(workload: Workload) -> list[RankMemory]:
    """Return the memory of a rank at each place of the pipeline.

    With ZeRO, of the first rank of a group: the others hold as much, or a row less of each tensor.
    """
    return [_Rank(workload, rank).memory() for rank in range(workload.layout.pp)]


def worst(workload: Workload) -> RankMemory:
    """Return the memory of the rank that needs most."""
    return max(memory_of(workload), key=lambda memory: memory.total_bytes)


class _Rank:
    """Works out the moments of one rank."""

    def __init__(self, workload: Workload, rank: int) -> None:
        layout, train, shape = workload.layout, workload.config.train, workload.shape
        self.workload, self.layout, self.rank, self.shape = workload, layout, rank, shape
        self.stages = workload.stages_of_ranks[rank]
        self.on_cpu = workload.cluster.device.kind == "cpu"
        self.offload = workload.config.parallel.offload and not self.on_cpu
        self.recompute, self.chunk = train.recompute, train.recompute_layers
        self.groups = groups_of(shape, layout, self.stages)
        self.block_weights = block_group(shape, layout.tp)
        self.block, self.end = block_bytes(workload), end_bytes(workload)
        self.parts = layout.dp_shard
        self.is_first = self.stages[0].start == 0
        self.is_last = self.stages[-1].stop == shape.n_layers
        self.table = 4 * shape.padded_vocab_size // layout.tp * shape.d_model
        self.whole = 4 * sum(group.numel * count for group, count in self.groups)
        self.shards = 4 * sum(group.sharded(self.parts) * count for group, count in self.groups)
        self.blocks = sum(map(len, self.stages))
        self.root = self.whole - 4 * self.block_weights.numel * self.blocks
        self.is_ddp = layout.dp_replicate > 1 and layout.tp * layout.pp == 1 and not layout.zero
        self.low = workload.dtype != "fp32"

    def memory(self) -> RankMemory:
        moments = [self._moment("between steps", gradients=self.shards)]
        moments += self._computation()
        moments.append(self._moment("gradients summed", gradients=self.shards, communication=self._flat()))
        moments.append(self._moment("optimiser step", gradients=self.shards, activations=self._update()))
        host = (self.shards + self._optimizer()) if self.offload else 0
        return RankMemory(self.rank, tuple(moments), host)

    def _moment(self, name: str, **more: int) -> Moment:
        train = self.workload.config.train
        held = dict.fromkeys(CATEGORIES, 0)
        held |= {"weights": self.shards, "optimizer": self._optimizer(), "pipeline": self._boundaries()}
        held |= more
        if self.offload:
            held |= dict.fromkeys(("weights", "optimizer", "gradients"), 0)
        if not self.on_cpu:
            held["reserve"] = int(sum(held.values()) * _RESERVE)
            held["context"] = _CONTEXT_BYTES
        del train
        return Moment(name, held)

    def _optimizer(self) -> int:
        """Return two moments and a counter a tensor for AdamW, momentum alone for SGD and Muon."""
        settings = self.workload.config.optimizer
        if settings.name == "sgd":
            return self.shards if settings.momentum else 0
        total = 0
        for group, count in self.groups:
            values, tensors = 2 * group.sharded(self.parts), group.count
            if settings.name == "muon" and group.orthogonal:
                values, tensors = values - group.sharded_matrices(self.parts), len(group.vectors)
            total += 4 * (values + tensors) * count
        return total

    def _boundaries(self) -> int:
        """Return the buffers in which a stage receives activations and gradients of every micro-batch."""
        if self.layout.pp == 1:
            return 0
        ends = sum((s.start > 0) + (s.stop < self.shape.n_layers) for s in self.stages)
        return ends * self.workload.num_microbatches * self.block.stream

    def _kept(self, layers: int) -> tuple[int, int]:
        """Return layer inputs, and other activations, of one micro-batch in so many layers of a stage."""
        block = self.block
        if self.recompute == "full":
            return -(-layers // self.chunk) * block.stream, 0
        if self.recompute == "selective":
            return layers * block.stream, layers * block.products
        return layers * block.stream, layers * (block.saved + block.weight_copies)

    def _computation(self) -> list[Moment]:
        """Return the moments of the micro-batch with most in flight, its gradients before and after."""
        moments: list[Moment] = []
        count = self.workload.num_microbatches
        for held in in_flight(self.layout, self.rank, count):
            moments += self._backward(held.counts, held.stage, first=held.first)
        return moments

    def _backward(self, counts: tuple[int, ...], stage: int, *, first: bool) -> list[Moment]:
        """Return the moments of the loss and backward pass of one micro-batch in a stage.

        `counts` are the micro-batches in flight in each stage, this one included; with `first`, no gradient
        is there yet.
        """
        layers = self.stages[stage]
        has_loss = layers.stop == self.shape.n_layers
        inputs = others = 0
        for number, (held, some) in enumerate(zip(counts, self.stages, strict=True)):
            kept, saved = self._kept(len(some))
            received = self.block.stream if some.start else 0  # the buffer that it came in
            end = self.block.stream if some.stop < self.shape.n_layers else self.end.saved
            full = held - (number == stage and has_loss)
            inputs += held * (kept - received)
            others += held * (saved + end)
            del full
        logits = counts[stage] * self.end.logits if has_loss else 0
        copies = self._copies(counts, stage)
        del copies
        block, end = self.block, self.end
        moments = []
        gathered = self._gathered()
        done = 0 if first else self.shards
        if self.is_ddp:
            done = self.shards
        accumulating = bool(done)
        if has_loss:
            cached = block.weight_copies * len(layers) if self.recompute != "none" else 0
            moments.append(
                self._moment(
                    "loss",
                    gradients=done,
                    layer_inputs=inputs,
                    activations=others + cached + end.loss_workspace + end.weight_copies,
                    logits=logits,
                    communication=gathered,
                )
            )
            table = end.weight_copies + max(0, self.table - logits) if self.low else self.table
            moments.append(
                self._moment(
                    "backward of the head",
                    gradients=done,
                    layer_inputs=inputs,
                    activations=others + table + end.workspace + end.weight_copies,
                    logits=logits,
                    communication=gathered,
                )
            )
            logits -= end.logits
            others -= end.saved
            done += self._gradient(self.root if not self.is_first else self.table, accumulating)
            head = self.table if self.shape.tie_embeddings and accumulating and self.is_first else 0
        else:
            head = 0
        chunk = min(self.chunk, len(layers)) if self.recompute == "full" else 1
        workspace = block.workspace
        if self.recompute == "full":
            workspace += chunk * (block.saved + block.weight_copies) + (chunk - 1) * block.stream
        elif self.recompute == "selective":
            workspace += block.recomputed_saved + block.weight_copies
        down = 4 * self.shape.d_model * self.shape.d_ff // self.layout.tp
        step_inputs, step_others = self._kept(chunk)
        grads_block = 4 * self.block_weights.numel
        steps = len(layers) // chunk
        for number in sorted({0, steps - 1}):
            more = self._gradient(number * chunk * grads_block, accumulating)
            moments.append(
                self._moment(
                    f"backward of layer {layers.stop - 1 - number * chunk}",
                    gradients=done + more,
                    layer_inputs=inputs - number * step_inputs,
                    activations=others - number * step_others + workspace + down + head,
                    logits=logits,
                    communication=gathered + self._scattering(number),
                )
            )
        if layers.start == 0:
            kept, saved = self._kept(len(layers))
            moments.append(
                self._moment(
                    "backward of the embedding",
                    gradients=max(done, self.shards),
                    layer_inputs=inputs - kept,
                    activations=others - saved + 2 * self.block.stream + head + self.table,
                    logits=logits,
                    communication=gathered + self._scattering(1),
                )
            )
        return moments

    def _gradient(self, size: int, accumulating: bool) -> int:
        """Return the bytes that gradients of so many bytes of weights add."""
        return 0 if accumulating else size // (self.parts if self.layout.zero else 1)

    def _copies(self, counts: tuple[int, ...], stage: int) -> int:
        return 0

    def _gathered(self) -> int:
        """Return FSDP's gathered weights: all of them, or with ZeRO-3 those of two blocks and the ends."""
        if not self.layout.zero:
            return 0
        if self.layout.zero < 3:
            return self.whole
        return self.root + 2 * 4 * self.block_weights.numel

    def _scattering(self, number: int) -> int:
        """Return whole gradients on their way to shards."""
        if not self.layout.zero:
            return 0
        if self.layout.zero == 1 and self.workload.num_microbatches > 1:
            return self.whole
        return (
            (1 + _SCATTERS_IN_FLIGHT["cpu" if self.on_cpu else "cuda"] * bool(number))
            * 4
            * (self.block_weights.numel)
        )

    def _flat(self) -> int:
        """Return the flat copies of gradients that replicas of a cut model sum, and tied embeddings."""
        size = 0
        if self.layout.dp_replicate > 1 and not self.is_ddp:
            reduce = self.workload.config.precision.reduce_dtype
            size += self.shards + (self.shards // 2 if reduce == "bf16" else 0)
        return size

    def _update(self) -> int:
        """Return what the optimiser's update needs beside its state; AdamW's fused kernel needs nothing."""
        settings = self.workload.config.optimizer
        largest = 4 * max(group.largest() for group, _ in self.groups) // self.parts
        if settings.name == "sgd":
            return largest if settings.weight_decay else 0
        return 4 * largest if settings.name == "muon" else 0
