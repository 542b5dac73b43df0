"""Memory of each rank by category over a step (no torch).

docs/planner.md has each formula with its source; `shoal.plan.simulate` checks them on the real model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shoal.plan.activations import block_bytes, end_bytes
from shoal.plan.in_flight import InFlight, in_flight
from shoal.plan.weights import block_group, ends_group, groups_of
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
_OUTSIDE = ("reserve", "context")  # beside what tensors take
# Of a 345M GPT-2 on a 24 GB GPU: 13,826 MiB reserved where 11,927 were allocated at the peak, and 15,107 in
# nvidia-smi (run of 2020, docs/planner.md).
_RESERVE = 13_826 / 11_927.47 - 1
_CONTEXT_BYTES = (15_107 - 13_826) << 20
_LATE_SCATTERS = 2  # on a CPU: shoal.parallel.shard


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


def memory_of(workload: Workload, profile: Literal["shoal", "megatron_2020"] = "shoal") -> list[RankMemory]:
    """Return the memory of a rank at each place of the pipeline.

    With ZeRO, of the first rank of a group: the others hold as much, or a row less of each tensor. `profile`
    says whose rules hold: this code's, or those of Megatron-LM's runs of 2020.
    """
    if profile == "megatron_2020":
        return _megatron_2020(workload)
    return [_Rank(workload, rank).memory() for rank in range(workload.layout.pp)]


def worst(workload: Workload) -> RankMemory:
    """Return the memory of the rank that needs most."""
    return max(memory_of(workload), key=lambda memory: memory.total_bytes)


@dataclass
class _Held:
    """What a rank holds at a moment beside weights, optimiser and buffers of the pipeline."""

    gradients: int = 0
    layer_inputs: int = 0
    activations: int = 0
    logits: int = 0
    communication: int = 0


@dataclass(frozen=True)
class _Pass:
    """The backward pass of one micro-batch in one stage."""

    layers: range
    has_gradients: bool  # of earlier ones, or buckets for them
    is_first: bool
    is_last: bool


class _Rank:
    """Works out the moments of one rank."""

    def __init__(self, workload: Workload, rank: int) -> None:
        layout, train, shape = workload.layout, workload.config.train, workload.shape
        self.workload, self.layout, self.rank, self.shape = workload, layout, rank, shape
        self.stages = workload.stages_of_ranks[rank]
        self.on_cpu = workload.cluster.device.kind == "cpu"
        self.offload = workload.config.parallel.offload and not self.on_cpu
        self.inputs_on_host = train.recompute_offload and not self.on_cpu
        self.recompute, self.chunk = train.recompute, train.recompute_layers
        self.block, self.end = block_bytes(workload), end_bytes(workload)
        self.groups = groups_of(shape, layout, self.stages)
        self.num_blocks = sum(map(len, self.stages))
        self.block_weights = 4 * block_group(shape, layout.tp).numel
        self.whole = 4 * sum(group.numel * count for group, count in self.groups)
        self.shards = 4 * sum(group.sharded(layout.dp_shard) * count for group, count in self.groups)
        self.ends = self.whole - self.block_weights * self.num_blocks
        self.table = 4 * shape.padded_vocab_size // layout.tp * shape.d_model
        self.has_first, self.has_last = self.stages[0].start == 0, self.stages[-1].stop == shape.n_layers
        self.is_tied = shape.tie_embeddings and self.has_first and self.has_last
        self.is_ddp = layout.dp_replicate > 1 and layout.tp * layout.pp == 1 and not layout.zero

    def memory(self) -> RankMemory:
        moments = [self._moment("between steps", _Held(self.shards))]
        for held in in_flight(self.layout, self.rank, self.workload.num_microbatches):
            moments += self._micro_batch(held)
        moments.append(self._moment("gradients summed", _Held(self.shards, communication=self._flat())))
        moments.append(self._moment("optimiser step", _Held(self.shards, activations=self._update())))
        host = self.shards + self.optimizer + self.shards if self.offload else 0
        return RankMemory(self.rank, tuple(moments), host)

    def _moment(self, name: str, held: _Held) -> Moment:
        sizes = dict.fromkeys(CATEGORIES, 0) | vars(held)
        sizes["pipeline"] = self._boundaries()
        if self.offload:  # one block's shards pass through the device
            sizes |= {"gradients": 0, "offload": 2 * self.block_weights // self.layout.dp_shard}
        else:
            sizes |= {"weights": self.shards, "optimizer": self.optimizer}
        if self.inputs_on_host:
            sizes |= {"layer_inputs": 0, "offload": sizes["offload"] + 2 * self.block.stream}
        if not self.on_cpu:
            sizes["reserve"] = int(sum(sizes.values()) * _RESERVE)
            sizes["context"] = _CONTEXT_BYTES
        return Moment(name, sizes)

    @cached_property
    def optimizer(self) -> int:
        """Two moments and a counter a tensor for AdamW, momentum alone for SGD and Muon."""
        settings, parts = self.workload.config.optimizer, self.layout.dp_shard
        if settings.name == "sgd":
            return self.shards if settings.momentum else 0
        total = 0
        for group, count in self.groups:
            values, tensors = 2 * group.sharded(parts), group.count
            if settings.name == "muon" and group.orthogonal:
                values, tensors = values - group.sharded_matrices(parts), len(group.vectors)
            total += 4 * (values + tensors) * count
        return total

    def _boundaries(self) -> int:
        """Return the buffers in which stages receive activations and gradients of every micro-batch."""
        if self.layout.pp == 1:
            return 0
        ends = sum((s.start > 0) + (s.stop < self.shape.n_layers) for s in self.stages)
        return ends * self.workload.num_microbatches * self.block.stream

    def _kept(self, layers: int) -> tuple[int, int]:
        """Return layer inputs, and other activations, of one micro-batch in so many layers."""
        block = self.block
        if self.recompute == "full":
            return -(-layers // self.chunk) * block.stream, 0
        if self.recompute == "selective":
            return layers * block.stream, layers * block.products
        return layers * block.stream, layers * (block.saved + block.weight_copies)

    def _micro_batch(self, now: InFlight) -> Iterator[Moment]:
        """Yield the moments of the end of one forward pass and of its backward pass."""
        layers, zero = self.stages[now.stage], self.layout.zero
        done = now.done[now.stage]
        state = _Pass(
            layers,
            has_gradients=(done > 0 and zero != 1) or self.is_ddp,
            is_first=not done,
            is_last=done == self.workload.num_microbatches - 1,
        )
        held = _Held(gradients=self._summed(now), communication=self._gathered(state))
        if zero > 1 and done:  # FSDP keeps what it scattered last until it scatters again
            held.communication += self.ends
        for number, put_off, some in zip(now.counts, now.put_off, self.stages, strict=False):
            inputs, others = self._kept(len(some))
            end = self.end if some.stop == self.shape.n_layers else None
            held.layer_inputs += number * (inputs - (self.block.stream if some.start else 0))
            held.activations += number * (others + (end.saved if end else self.block.stream))
            held.activations += put_off * len(some) * self.block.put_off * (some.start > 0)
            held.logits += number * end.logits if end else 0
        if now.follows_forward:
            yield self._forward(held, layers)
        if self.layout.pp > 1 and self.layout.schedule == "zero_bubble" and layers.start:
            yield from self._split(held, state)
            return
        if layers.stop == self.shape.n_layers:
            yield from self._head(held, state)
        yield from self._layers(held, state)
        if zero == 3:
            held.communication -= 2 * self.block_weights
        if layers.start == 0:
            # A gradient as dense as the table; of a tied one, the sum with the head's is a third.
            held.activations += 2 * self.block.stream + self.table * (1 + self.is_tied)
            yield self._moment("backward of the embedding", held)
        if zero > 1 or (zero and state.is_last):
            yield self._reduction_of_ends(held, state)

    def _forward(self, held: _Held, layers: range) -> Moment:
        """Return the end of a forward pass, until which autocast's cache holds copies of all weights.

        It holds none of the weights that are cut twice, which are no leaves.
        """
        more = 0
        if self.recompute != "none" and not (self.layout.zero and self.layout.tp > 1):
            more = self.block.weight_copies * len(layers)
        if layers.stop == self.shape.n_layers:
            more += self.end.loss_workspace
        gathered = held.communication - self.block_weights * (self.layout.zero == 3)
        now = replace(held, activations=held.activations + more, communication=gathered)
        return self._moment("loss" if layers.stop == self.shape.n_layers else "forward", now)

    def _split(self, held: _Held, state: _Pass) -> Iterator[Moment]:
        """Yield the moments of a backward pass whose gradients of weights come later.

        Everything stays for them, and so do the gradients that they are made of.
        """
        layers, block = state.layers, self.block
        held.activations += len(layers) * block.put_off
        now = replace(held, activations=held.activations + 3 * block.stream)
        yield self._moment(f"backward of layer {layers.start}", now)
        held.activations -= len(layers) * block.put_off  # the head's, which is the largest, comes last
        table = self.table if layers.stop == self.shape.n_layers else 0
        if state.has_gradients:
            held.activations += table
        else:
            held.gradients += len(layers) * self.block_weights + table
        yield self._moment("gradients of weights", held)

    def _summed(self, now: InFlight) -> int:
        """Return the gradients that earlier backward passes of a step have left."""
        if self.is_ddp:
            return self.shards
        if self.layout.zero == 1:  # they come with the last backward pass
            return 0
        total = 0
        for some, done in zip(self.stages, now.done, strict=False):
            if done:
                ends = ends_group(
                    self.shape, self.layout.tp, first=not some.start, last=some.stop == self.shape.n_layers
                )
                total += len(some) * self.block_weights // self.layout.dp_shard
                total += 4 * ends.sharded(self.layout.dp_shard)
        return total

    def _head(self, held: _Held, state: _Pass) -> Iterator[Moment]:
        """Yield the backward pass of the head and the last norm; leave what is held after it."""
        end = self.end
        if self.layout.zero == 3:  # as they are sent, and cut into weights
            now = replace(held, communication=held.communication + self.ends - 2 * self.block_weights)
            yield self._moment("gathering of the ends", now)
            held.communication -= self.block_weights
        more = end.workspace + self.table
        if end.table:  # a gradient in low precision; one in fp32 when logits and copy are gone
            more = end.workspace + max(end.table, self.table - end.logits)
        yield self._moment("backward of the head", replace(held, activations=held.activations + more))
        held.logits -= end.logits
        held.activations -= end.saved
        more = end.norm_workspace
        # It is held until the embedding's is added, or all of the ends is scattered.
        if self.is_tied or self.layout.zero:
            held.activations += self.table
        elif not state.has_gradients:
            held.gradients += self.table
        if self.layout.zero == 3:
            held.communication += self.block_weights
        yield self._moment("backward of the last norm", replace(held, activations=held.activations + more))

    def _layers(self, held: _Held, state: _Pass) -> Iterator[Moment]:
        """Yield the backward pass of the last and the first chunk of layers, between which all is linear."""
        block, layers, zero = self.block, state.layers, self.layout.zero
        chunk = min(self.chunk, len(layers)) if self.recompute == "full" else 1
        work = block.workspace + 4 * self.shape.d_model * self.shape.d_ff // self.layout.tp
        if self.recompute == "full":
            work += chunk * (block.saved + block.weight_copies) + (chunk - 1) * block.stream
        elif self.recompute == "selective":
            work += block.recomputed_saved + block.weight_copies - block.result  # that of its MLP is read
        inputs, others = self._kept(chunk)
        scatter = self.block_weights if zero > 1 or (zero and state.is_last) else 0
        accumulated = zero == 1 and not state.is_first
        late = 0
        for layer in range(layers.stop - chunk, layers.start - 1, -chunk):
            if layer + chunk == layers.stop or layer < layers.start + chunk:
                now = replace(held, activations=held.activations + work)
                now.communication += late
                yield self._moment(f"backward of layer {layer}", now)
                if scatter:  # gradients of a block, and their copy
                    now.communication += scatter * (1 if accumulated else 2)
                    now.activations += block.stream - others - work
                    yield self._moment(f"reduction of layer {layer}", now)
            if state.has_gradients and zero > 1 and not late:
                held.communication -= self.ends  # scattered before
            if scatter and not state.has_gradients and self.on_cpu:
                late = min(late + scatter, _LATE_SCATTERS * scatter)
            if state.is_last and zero in (1, 2):
                held.communication -= chunk * self.block_weights * (2 if accumulated else 1)
            held.layer_inputs -= inputs
            held.activations -= others
            if not state.has_gradients and (scatter or not zero):
                held.gradients += chunk * self.block_weights // self.layout.dp_shard
        held.communication += late

    def _reduction_of_ends(self, held: _Held, state: _Pass) -> Moment:
        """Return the scattering of what is no block: its gradients, and their copy."""
        layers = state.layers
        tables = (layers.start == 0) + (layers.stop == self.shape.n_layers)
        kept = self.whole if self.layout.zero == 2 and not state.is_last else 0
        late = 0 if state.has_gradients or not self.on_cpu else _LATE_SCATTERS * self.block_weights
        now = replace(held, activations=held.activations - tables * self.table)
        # Autograd's last node keeps its result until the end: that of the positions, or of the table.
        shared = self.ends // self.layout.dp_shard
        shared += self.table if self.shape.style == "llama" and layers.start == 0 else 0
        now.communication = kept + late + self.ends + max(self.ends, shared)
        return self._moment("reduction of the ends", now)

    def _gathered(self, state: _Pass) -> int:
        """Return FSDP's gathered weights, of all modules, or with ZeRO-3 of two blocks and the ends."""
        if self.layout.zero == 1 and not state.is_first:
            return 2 * self.whole  # with the gradients, which are not summed before the last backward pass
        if self.layout.zero:
            return self.whole if self.layout.zero < 3 else self.ends + 2 * self.block_weights
        return 0

    def _flat(self) -> int:
        """Return the flat copies of gradients that replicas of a cut model, and tied embeddings, sum."""
        sizes = [0]
        if self.layout.dp_replicate > 1 and not self.is_ddp:
            sizes.append(self.shards)
        if self.layout.pp > 1 and self.shape.tie_embeddings and (self.has_first or self.has_last):
            sizes.append(self.table // self.layout.dp_shard)
        half = self.workload.config.precision.reduce_dtype == "bf16"
        return max(sizes) * 3 // 2 if half else max(sizes)

    def _update(self) -> int:
        """Return what the optimiser's update needs beside its state; a fused kernel needs nothing."""
        settings, is_cut = self.workload.config.optimizer, self.layout.zero > 0 or self.layout.tp > 1
        if settings.name == "sgd" and settings.weight_decay and is_cut:  # decay is added to the gradient
            return 4 * max(group.largest() for group, _ in self.groups) // self.layout.dp_shard
        return 4 * 4 * self.groups[0][0].largest() if settings.name == "muon" else 0


def _megatron_2020(workload: Workload) -> list[RankMemory]:
    """Return the memory of a rank by the rules of Megatron-LM's fp16 training in 2020, with all recomputed.

    20 bytes a parameter: fp16 weight and gradient, fp32 weight, gradient and two moments. Inputs of layers in
    fp16, and three fp32 copies of the logits.
    """
    shape, layout, train = workload.shape, workload.layout, workload.config.train
    tokens = train.micro_batch_size * train.seq_len
    found = []
    for rank, stages in enumerate(workload.stages_of_ranks):
        count = sum(group.numel * number for group, number in groups_of(shape, layout, stages))
        state = dict.fromkeys(CATEGORIES, 0) | {
            "weights": 2 * count,
            "master_weights": 4 * count,
            "gradients": 6 * count,
            "optimizer": 8 * count,
        }
        layers = sum(map(len, stages)) * min(workload.num_microbatches, layout.pp - rank)
        logits = 12 * tokens * shape.padded_vocab_size // layout.tp if rank == layout.pp - 1 else 0
        peak = state | {"layer_inputs": 2 * layers * tokens * shape.d_model, "logits": logits}
        for moment in (state, peak):
            moment |= {"reserve": int(sum(moment.values()) * _RESERVE), "context": _CONTEXT_BYTES}
        found.append(RankMemory(rank, (Moment("between steps", state), Moment("loss", peak))))
    return found
