"""Seconds of an optimiser step by the phases of metrics.jsonl, and what follows for the run (no torch).

docs/planner.md has the formulas with their sources. Times are of a rank along pp that holds the loss, whose
phases a run records: as there, "forward" and "backward" include "tp" and "shard", the waiting within them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.models.counts import count_parameters, flops_per_token
from shoal.plan.link_cost import Link, all_reduce_cost, collective_cost
from shoal.plan.machine import rates_of
from shoal.plan.rates import BACKWARD, Law, Rates
from shoal.plan.sync_cost import Replicas, demand
from shoal.plan.weights import block_group, ends_group, weight_shapes
from shoal.plan.workload import Workload

PHASES = ("data", "forward", "backward", "tp", "shard", "bubble", "communication", "optimiser")
INSIDE = ("tp", "shard")  # lie within forward and backward
_STATE_BYTES = {"adamw": 8, "sgd": 4, "muon": 4}  # a parameter; muon: of the blocks' matrices
_UPDATE_BYTES = {"adamw": 28, "sgd": 20, "muon": 20}  # read and written by the update of a parameter
_NORM_BYTES = 16  # forgetting gradients, their norm and clipping: one write, two reads, one write
_MUON_ROUNDS = 5  # Newton-Schulz iterations of torch.optim.Muon
_COMPILED = 0.5  # memory traffic of a block's pointwise kernels when they are fused
_COMPILING_PAYS = 8e15  # operations of a rank, see parallel.compile
_ZERO_BUBBLE = 1 / 3  # of 1F1B's bubble where both halves of a backward pass last as long as the forward pass


@dataclass(frozen=True)
class Software:
    """How a trainer computes; the defaults are Shoal's, others are those of published runs."""

    stream_bytes: int = 4  # of a value of the residual stream; autocast leaves it in fp32
    whole_recompute: bool = False  # of a chunk of layers; torch's checkpoint stops before the last product
    pointwise: float = 1.0  # memory traffic of a block's pointwise kernels, relative to separate ones
    score_accesses: tuple[float, float] = (10.0, 10.0)  # of each score in plain attention, forward, backward
    compiled_loss: bool = True  # on GPUs: one kernel in place of one for each operation, in fp32
    buckets: bool = False  # replicas exchange during the backward pass under tp and pp as well
    chunks: int = 0  # pipeline stages that a rank holds in turn; 0: as the layout says


SHOAL = Software()


@dataclass(frozen=True)
class StepTime:
    """Time of an optimiser step."""

    phases: dict[str, float]  # seconds by PHASES
    tokens: int = 0
    flops: float = 0.0  # of the model, by models.counts
    peak_flops: float = 0.0  # of all devices

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(seconds for name, seconds in self.phases.items() if name not in INSIDE)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s as a fraction of the peak; None for a format that the device does not have."""
        return self.flops / self.total / self.peak_flops if self.peak_flops else None


@dataclass(frozen=True)
class RunCost:
    """What a whole run takes."""

    hours: float  # steps and validations
    usd: float | None  # None: no price is known
    checkpoint_bytes: int
    disk_bytes: int  # of the checkpoints that are kept, while the next one is written


@dataclass(frozen=True)
class _Part:
    """Seconds of one micro-batch on one rank along pp."""

    forward: float
    backward: float  # with what is computed again
    block_forward: float  # of one layer
    block_backward: float
    tp_forward: float  # within forward and backward
    tp_backward: float
    parameters: int  # on the rank, before ZeRO
    block_parameters: int  # of one layer

    @property
    def both(self) -> float:
        return self.forward + self.backward


def step_time(workload: Workload, rates: Rates | None = None, software: Software = SHOAL) -> StepTime:
    """Return the time of a step; without `rates` at those measured here, or the hardware table's.

    Raises:
        ConfigError: A GPU that does not have the number format.
    """
    device, layout, shape = workload.cluster.device, workload.layout, workload.shape
    rates = rates or rates_of(device, workload.cluster.per_node, workload.dtype)
    kinds = [
        (sum(map(len, stages)), rank == 0, rank == layout.pp - 1)
        for rank, stages in enumerate(workload.stages_of_ranks)
    ]
    parts = [_part(workload, rates, software, *kind) for kind in dict.fromkeys(kinds)]  # the last one last
    own, count = parts[-1], workload.num_microbatches
    shard_forward, shard_backward = _shard(workload, rates, own, software)
    phases = dict.fromkeys(PHASES, 0.0)
    phases["data"] = 16 * workload.config.train.seq_len * _sequences(workload) / device.host_bytes_per_s
    phases["forward"] = count * own.forward + shard_forward
    phases["backward"] = count * own.backward + shard_backward
    phases["tp"] = count * (own.tp_forward + own.tp_backward)
    phases["shard"] = shard_forward + shard_backward
    phases["bubble"] = _bubble(workload, rates, parts, software)
    step_s = phases["forward"] + phases["backward"] + phases["bubble"]
    phases["optimiser"] = _optimiser(workload, rates, own)
    phases["communication"] = _communication(workload, rates, own, step_s, software)
    flops = flops_per_token(shape, workload.config.train.seq_len) * workload.global_tokens
    peak = device.flops.get(workload.dtype, 0.0) * layout.world_size * layout.replica_groups
    return StepTime(phases, workload.global_tokens, float(flops), peak)


def run_cost(workload: Workload, step: StepTime) -> RunCost:
    """Return the time, price and disk space of the whole run.

    Validations are forward passes at the rate of the step's.
    """
    config, device = workload.config, workload.cluster.device
    train, evaluation, kept = config.train, config.eval, config.checkpoint
    forward_s = step.phases["forward"] + step.phases["bubble"] / 3
    sequences = evaluation.sequences * (evaluation.seq_len or train.seq_len) / train.seq_len
    validation_s = forward_s * sequences / train.global_batch_size
    times = train.steps // evaluation.every if evaluation.every else 0
    hours = (train.steps * step.total + times * validation_s) / 3600
    counts = count_parameters(workload.shape)
    state = _STATE_BYTES[config.optimizer.name] * counts.total
    if config.optimizer.name == "muon":
        state += 4 * (counts.total - counts.block_matrices)
    whole = 4 * counts.total + state
    milestones = train.steps // kept.keep_every if kept.keep_every else 0
    milestone = 4 * counts.total if kept.keep_every_weights_only else whole
    saves = 1 + (train.steps - 1) // kept.every if kept.every else 1
    disk = min(saves, kept.keep_last + 1) * whole + max(0, milestones - kept.keep_last) * milestone
    price = device.usd_per_hour * workload.cluster.world_size * hours
    return RunCost(hours, price if device.usd_per_hour else None, whole, disk)


def _sequences(workload: Workload) -> int:
    """Return the sequences of a rank in a step."""
    return workload.num_microbatches * workload.config.train.micro_batch_size


class _Block:
    """Kernels of a decoder's layer for one micro-batch on one rank, timed."""

    def __init__(self, workload: Workload, rates: Rates, software: Software) -> None:
        config, layout = workload.config, workload.layout
        self.shape, self.rates, self.software = workload.shape, rates, software
        self.tokens = config.train.micro_batch_size * config.train.seq_len
        self.time, self.tp, self.value = config.train.seq_len, layout.tp, workload.activation_bytes
        self.stream = max(self.value, software.stream_bytes)
        self.pointwise = software.pointwise * (_COMPILED if _compiled(workload) else 1.0)
        self.own_tokens = self.tokens / (layout.tp if layout.sequence else 1)

    def product(self, inputs: float, outputs: float) -> tuple[float, float]:
        """Return the seconds of a linear layer, forward and backward: one product, then two as large."""
        flops = 2 * self.tokens * inputs * outputs
        moved = self.value * (self.tokens * (inputs + outputs) + inputs * outputs)
        return (
            self.rates.law("product").seconds(flops, moved),
            self.rates.law("product" + BACKWARD).seconds(2 * flops, 2 * moved, 2),
        )

    def kernel(self, name: str, forward: float, backward: float, calls: float = 1) -> tuple[float, float]:
        """Return the seconds of memory-bound kernels that move so many bytes."""
        return (
            self.rates.law(name).seconds(0, forward, calls),
            self.rates.law(name + BACKWARD).seconds(0, backward, calls),
        )

    def attention(self) -> tuple[float, float]:
        """Return the seconds of attention between its projections.

        Fused kernels leave out the masked half of the pairs and compute scores again in the backward pass,
        5 products for 2 (Dao et al., 2022). Plain attention, which dropout of probabilities needs, computes
        all pairs and moves each score several times.
        """
        shape, tp = self.shape, self.tp
        d, kv = shape.d_model / tp, shape.n_kv_heads * shape.head_dim / tp
        moved = self.value * self.tokens * (2 * d + 2 * kv)
        flops = 4 * self.tokens * self.time * d
        if not shape.attention_dropout:
            return (
                self.rates.law("attention").seconds(flops / 2, moved),
                self.rates.law("attention" + BACKWARD).seconds(2.5 * flops / 2, 2 * moved),
            )
        scores = self.tokens * self.time * shape.n_heads / tp * self.value
        passes, back = self.software.score_accesses
        law = self.rates.law("product")
        pointwise = self.kernel("memory", passes * scores, back * scores, 4)
        return (
            law.seconds(flops, 2 * (moved + scores), 2) + pointwise[0],
            law.seconds(2 * flops, 4 * (moved + scores), 4) + pointwise[1],
        )

    def between(self) -> tuple[float, float]:
        """Return the seconds of a block's norms, activation, residual sums, rotation and dropout."""
        shape, own = self.shape, self.own_tokens * self.shape.d_model
        a, r, fused = self.value, self.stream, self.pointwise
        cast = r + a if a < r else 0
        gelu = shape.style == "gpt2"
        hidden = self.tokens * shape.d_ff / self.tp * a
        parts = [
            self.kernel("norm", 2 * own * (2 * r + cast) * fused, 2 * own * (4 * r + cast) * fused, 2),
            self.kernel("add", 2 * own * (2 * r + a) * fused, 2 * own * 3 * r * fused, 2),
            self.kernel("gelu", 2 * hidden * fused, 3 * hidden * fused)
            if gelu
            else self.kernel("swiglu", 5 * hidden * fused, 8 * hidden * fused, 2),
        ]
        if not gelu:
            turned = self.tokens * (shape.d_model + shape.n_kv_heads * shape.head_dim) / self.tp
            parts.append(self.kernel("rotate", 8 * turned * a * fused, 8 * turned * a * fused, 8))
        if shape.dropout:
            parts.append(self.kernel("memory", 2 * own * 24 * fused, 2 * own * 8 * fused, 8))
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def host(self, recompute: str) -> tuple[float, float]:
        """Return the seconds of Python and autograd for a layer; on GPUs they pass while kernels run."""
        laws, kernel, none = self.rates.laws, f"layer {recompute}", Law(0.0, 0.0, 0.0)
        return laws.get(kernel, none).call_s, laws.get(kernel + BACKWARD, none).call_s

    def exchanges(self, axis: _Axis) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the seconds of an `enter` and a `leave` along tp, each forward and backward.

        See parallel.tensor: the whole stream enters without an exchange and leaves by an all_reduce, parts of
        sequences are gathered and scattered; the backward pass of each is the other's forward pass.
        """
        enters, leaves = (self.tokens * self.shape.d_model * size for size in (self.stream, self.value))
        if self.own_tokens == self.tokens:
            return (0.0, axis.all_reduce(enters)), (axis.all_reduce(leaves), 0.0)
        return (axis.gather(enters), axis.scatter(enters)), (axis.scatter(leaves), axis.gather(leaves))


def _part(
    workload: Workload, rates: Rates, software: Software, layers: int, first: bool, last: bool
) -> _Part:
    """Return the seconds of a micro-batch on a rank with so many layers."""
    block = _Block(workload, rates, software)
    shape, tp, train = workload.shape, workload.layout.tp, workload.config.train
    group = block_group(shape, tp)
    products = [block.product(inputs, outputs) for outputs, inputs in group.matrices]  # the last is `down`
    kernels = (*products, block.attention(), block.between())
    forward, backward = (sum(part) for part in zip(*kernels, strict=True))
    enter, leave = block.exchanges(_Axis(workload, rates, tp, 1))
    tp_forward, tp_backward = (2 * (there + back) for there, back in zip(enter, leave, strict=True))
    again, tp_again = _again(block, train.recompute, train.recompute_layers, products, forward, tp_forward)
    host_forward, host_backward = block.host(train.recompute)
    forward, backward = forward + host_forward, backward + host_backward
    if train.recompute_offload and workload.cluster.device.kind == "cuda":
        kept = block.own_tokens * shape.d_model * block.stream / train.recompute_layers
        forward += kept / workload.cluster.device.host_bytes_per_s
        again += kept / workload.cluster.device.host_bytes_per_s
    block_forward, block_backward = forward + tp_forward, backward + again + tp_backward + tp_again
    total_forward, total_backward = layers * block_forward, layers * block_backward
    table = shape.padded_vocab_size * shape.d_model // tp
    parameters = layers * group.numel + ends_group(shape, tp, first=first, last=last).numel
    ends_forward, ends_backward, ends_tp = 0.0, 0.0, [0.0, 0.0]
    stream = block.own_tokens * shape.d_model * block.stream
    if first:
        there, back = block.kernel("memory", 3 * stream, 2 * stream + 12 * table, 3)
        ends_forward, ends_backward = ends_forward + there, ends_backward + back
        ends_tp = [ends_tp[0] + leave[0], ends_tp[1] + leave[1]]
    if last:
        for there, back in (
            block.product(shape.d_model, shape.padded_vocab_size / tp),
            block.kernel("norm", 2 * stream, 4 * stream),
            _loss(workload, block),
        ):
            ends_forward, ends_backward = ends_forward + there, ends_backward + back
        ends_tp = [ends_tp[0] + enter[0], ends_tp[1] + enter[1]]
    casts, sums = _weights(workload, block, parameters)
    tp_both = (layers * tp_forward + ends_tp[0], layers * (tp_backward + tp_again) + ends_tp[1])
    return _Part(
        total_forward + ends_forward + ends_tp[0] + casts,
        total_backward + ends_backward + ends_tp[1] + casts + sums,
        block_forward,
        block_backward,
        *tp_both,
        parameters,
        group.numel,
    )


def _again(
    block: _Block,
    recompute: str,
    layers: int,
    products: list[tuple[float, float]],
    forward: float,
    exchanges: float,
) -> tuple[float, float]:
    """Return the seconds of what the backward pass computes again for a layer: computing, exchanges.

    torch's checkpoint ends once the last tensor that is needed is there: the product `down` of a chunk's
    last layer is not computed again, nor what follows it.
    """
    whole = block.software.whole_recompute
    if recompute == "selective":
        again = block.attention()[0] + (0.0 if whole else block.between()[0])
        return again, 0.0 if whole else exchanges / 2
    if recompute == "none":
        return 0.0, 0.0
    spared = 0.0 if whole else 1 / layers
    return forward - spared * products[-1][0], exchanges - spared * exchanges / 2


def _loss(workload: Workload, block: _Block) -> tuple[float, float]:
    """Return the seconds of the cross entropy; a GPU's is compiled, and moves each logit once, then twice."""
    logits = block.tokens * workload.shape.padded_vocab_size / workload.layout.tp
    if workload.cluster.device.kind == "cuda" and block.software.compiled_loss:
        return block.kernel("loss", logits * block.value, 2 * logits * block.value)
    return block.kernel("loss", logits * (block.value + 12), logits * (2 * block.value + 24))


def _weights(workload: Workload, block: _Block, parameters: int) -> tuple[float, float]:
    """Return the seconds for the cast of weights, forward as backward, and for adding up their gradients.

    DDP adds each gradient to its bucket; otherwise the first one becomes the gradient, later ones are added.
    """
    memory = block.rates.law("memory")
    casts = memory.seconds(0, 6 * parameters, 0) if block.value < block.stream else 0.0
    count = workload.num_microbatches
    buckets = workload.layout.dp_replicate > 1 and workload.layout.world_size == workload.layout.dp_replicate
    return casts, memory.seconds(0, 12 * parameters * (1.0 if buckets else (count - 1) / count), 0)


def _compiled(workload: Workload) -> bool:
    """Say whether the blocks are compiled; see parallel.compile. A CPU's rates are of uncompiled ones."""
    setting, layout, train = workload.config.train.compile, workload.layout, workload.config.train
    if setting == "off" or layout.pp > 1:
        return False
    tokens = train.steps * workload.global_tokens / layout.world_size
    work = tokens * flops_per_token(workload.shape, train.seq_len)
    return setting == "on" or (workload.cluster.device.kind == "cuda" and work >= _COMPILING_PAYS)


@dataclass(frozen=True)
class _Axis:
    """A ring of `size` ranks that are `stride` apart, and the seconds of its collectives."""

    workload: Workload
    rates: Rates
    size: int
    stride: int

    def link(self, collective: str = "all_reduce") -> Link:
        """Return the link of a collective: the measured one within a node, else the cluster's.

        A ring over several nodes enters each of them once. NCCL has a ring for each of the members in a node,
        over links of their own, so that together they have the bandwidth of all these links.
        """
        cluster, stride = self.workload.cluster, self.stride
        link = cluster.link_of(self.size, stride)
        if link == cluster.inside and (measured := self.rates.links.get(collective)):
            return measured
        if link != cluster.inside:
            here = max(1, cluster.per_node // stride)
            latency_s = ((here - 1) * cluster.inside.latency_s + link.latency_s) / here
            link = Link(latency_s, min(cluster.inside.bytes_per_s, here * link.bytes_per_s))
        return Link(link.latency_s, link.bytes_per_s * self.rates.link_share)

    def all_reduce(self, num_bytes: float) -> float:
        """Return the seconds of an all_reduce of a tensor."""
        return all_reduce_cost("chunked_ring", self.size, num_bytes).seconds(self.link())

    def gather(self, num_bytes: float) -> float:
        """Return the seconds to gather a tensor of which each rank has a part."""
        return collective_cost("all_gather", self.size, num_bytes / self.size).seconds(
            self.link("all_gather")
        )

    def scatter(self, num_bytes: float) -> float:
        """Return the seconds to add up a tensor and leave each rank its part."""
        return collective_cost("reduce_scatter", self.size, num_bytes).seconds(self.link("reduce_scatter"))


def _shard(workload: Workload, rates: Rates, part: _Part, software: Software) -> tuple[float, float]:
    """Return the seconds that a step waits for ZeRO's gathers, forward, and in the backward passes.

    The exchanges of a layer are hidden behind the computing of another; the first is not. On CPUs none is:
    fully_shard orders them by a GPU's streams, and waits for each where there are none. With offload, shards
    come from host memory before they are gathered, and gradients go there.
    """
    layout, count = workload.layout, workload.num_microbatches
    copied_s = 0.0  # a byte of a shard
    if workload.config.parallel.offload and workload.cluster.device.kind == "cuda":
        copied_s = 1 / workload.cluster.device.host_bytes_per_s
    if not layout.zero or (layout.dp_shard == 1 and not copied_s):
        return 0.0, 0.0
    axis = _Axis(workload, rates, layout.dp_shard, layout.tp)
    overlap = rates.overlap if workload.cluster.device.kind == "cuda" else 0.0
    layers = max(1, sum(map(len, workload.stages_of_ranks[-1])))
    rest = max(0, part.parameters - layers * part.block_parameters)
    width = 2 if software.stream_bytes == 2 else 4
    scattered = 2 if workload.config.precision.reduce_dtype == "bf16" else 4

    def gather(parameters: int) -> float:
        return axis.gather(width * parameters) + width * parameters / layout.dp_shard * copied_s

    def scatter(parameters: int) -> float:
        return axis.scatter(scattered * parameters) + 4 * parameters / layout.dp_shard * copied_s

    def waiting(each: float, others: float, computing: float) -> float:
        return others + each + (layers - 1) * (each - overlap * min(each, computing))

    each, others = gather(part.block_parameters), gather(rest)
    each_sum, other_sums = scatter(part.block_parameters), scatter(rest)
    forward = waiting(each, others, part.block_forward)
    sums = waiting(each_sum, other_sums, part.block_backward)
    if layout.zero == 1:
        return forward, sums
    if layout.zero == 2:
        return forward, count * sums
    both = waiting(each + each_sum, others + other_sums, part.block_backward)
    return count * forward, count * both


def _bubble(workload: Workload, rates: Rates, parts: list[_Part], software: Software) -> float:
    """Return the seconds that the last rank along pp waits for others.

    A pipeline of p ranks takes m + (p - 1)/v times the slowest rank's forward and backward pass of one of m
    micro-batches, with v stages a rank (Narayanan et al., 2021, section 2.2); zero_bubble's wait is a third
    (Qi et al., 2023, table 1). A rank sends and receives a micro-batch's stream for each of its stages.
    """
    layout, count = workload.layout, workload.num_microbatches
    if layout.pp == 1:
        return 0.0
    stages = software.chunks or layout.stages // layout.pp
    slowest = max(part.both for part in parts)
    waits = (layout.pp - 1) / stages * (_ZERO_BUBBLE if layout.schedule == "zero_bubble" else 1.0)
    train = workload.config.train
    stream = train.micro_batch_size * train.seq_len * workload.shape.d_model
    stream *= max(workload.activation_bytes, software.stream_bytes)
    stream //= layout.tp if layout.sequence or software.chunks else 1
    link = _Axis(workload, rates, layout.pp, layout.world_size // layout.pp).link()
    sending = 2 * (link.latency_s + stream / link.bytes_per_s) * stages
    return (count + waits) * (slowest + sending) - count * parts[-1].both


def _communication(workload: Workload, rates: Rates, part: _Part, step_s: float, software: Software) -> float:
    """Return the seconds of exchanges between replicas that nothing hides, and of the step's agreement."""
    layout, config, shape = workload.layout, workload.config, workload.shape
    world = layout.world_size * layout.replica_groups
    stride = layout.tp * layout.dp_shard
    waiting = 0.0
    if (count := layout.num_replicas) > 1:
        link = _Axis(workload, rates, count, stride).link()
        gradient_bytes = 2 if config.precision.reduce_dtype == "bf16" else 4
        ranks = layout.world_size * layout.replica_groups // count
        asked = demand(
            config.sync,
            weight_shapes(shape),
            Replicas(count, count, 1 if software.buckets else ranks, gradient_bytes),
        )
        sent = asked.link_bytes * part.parameters / layout.dp_shard / count_parameters(shape).total
        seconds = asked.messages * link.latency_s + sent / link.bytes_per_s
        beside = asked.behind_backward * part.backward + asked.behind_steps * step_s
        waiting += max(seconds - rates.overlap * min(seconds, beside), seconds * asked.tail)
    if layout.pp > 1 and shape.tie_embeddings:
        table = 4 * shape.padded_vocab_size * shape.d_model / layout.tp / layout.dp_shard
        waiting += _Axis(workload, rates, 2, world // layout.pp * (layout.pp - 1)).all_reduce(table)
    agreement = 2 * math.ceil(math.log2(world)) if world > 1 else 0
    return waiting + agreement * _Axis(workload, rates, world, 1).link().latency_s


def _optimiser(workload: Workload, rates: Rates, part: _Part) -> float:
    """Return the seconds of norm, clipping and update of what a rank owns."""
    config, layout, shape = workload.config, workload.layout, workload.shape
    owned = part.parameters / (layout.dp_shard if layout.zero else 1)
    law, name = rates.law("optimiser"), config.optimizer.name
    moved = (_UPDATE_BYTES[name] + _NORM_BYTES + 8 * (workload.dtype == "fp16")) * owned
    tensors = len(weight_shapes(shape)) / layout.pp
    seconds = law.seconds(0, moved, tensors if workload.cluster.device.kind == "cpu" else 1)
    if config.parallel.offload and workload.cluster.device.kind == "cuda":  # by the host, at most as fast
        seconds = moved / workload.cluster.device.host_bytes_per_s
    if name == "muon":
        layers = sum(map(len, workload.stages_of_ranks[-1]))
        sides = map(sorted, block_group(shape, 1).matrices)
        flops = sum(_MUON_ROUNDS * (4 * m * m * n + 2 * m**3) for m, n in sides)
        seconds += rates.law("product").seconds(layers * flops, 0, 0)
    return seconds
