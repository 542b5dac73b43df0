"""The typed sections of a configuration. A field's docstring is its documentation and its `--help`.

Sections are frozen and strict: an unknown key is an error. Rules that tie several fields together live in
`config.rules`, so that a section can be built from a few overrides alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and documents each field by its docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Model(Section):
    """The network that is trained, and the shape of a decoder."""

    network: Literal["decoder", "fcn-r", "lstm"] = "decoder"
    """decoder: a GPT on text. fcn-r: sigmoid layers 2048-4096-1024 that classify labelled examples. lstm: two
    LSTM layers of 256 on text. The last two have a fixed form: all that follows is for decoders."""
    style: Literal["gpt2", "llama"] = "gpt2"
    """gpt2: learned positions, LayerNorm, GELU-tanh, biases. llama: RoPE, RMSNorm, SwiGLU, no biases."""
    n_layers: PositiveInt = 12
    """Number of transformer blocks."""
    d_model: PositiveInt = 768
    """Width of the residual stream."""
    n_heads: PositiveInt = 12
    """Number of query heads."""
    n_kv_heads: NonNegativeInt = 0
    """Number of key and value heads (grouped-query attention); 0 means n_heads."""
    d_ff: NonNegativeInt = 0
    """Width of the MLP; 0 means 4 d_model (gpt2), or 8/3 d_model rounded up to a multiple of 128 (llama)."""
    max_seq_len: PositiveInt = 1024
    """Positions the model can hold: rows of the learned position table, or the length RoPE is meant for."""
    vocab_size: NonNegativeInt = 0
    """True vocabulary size; 0 takes the dataset's."""
    pad_vocab_multiple: PositiveInt = 128
    """The vocabulary is padded to a multiple of this, whatever the layout; padded rows are masked."""
    tie_embeddings: bool | None = None
    """Share the token embedding with the output head; unset means true for gpt2, false for llama."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in LayerNorm and RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position angles (llama)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on embeddings and on the output of attention and MLP."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on attention probabilities; uses plain attention instead of the fused kernel."""


class Data(Section):
    """What is trained on."""

    datasets: tuple[str, ...] = ()
    """Dataset folders made by `shoal prepare`; --data replaces them."""
    weights: tuple[PositiveFloat, ...] = ()
    """Sampling weight of each dataset; empty means every window of every dataset once an epoch."""
    reset_documents: bool = False
    """Attention sees only its own document, and positions restart with each document."""
    verify: Literal["once", "full", "off"] = "once"
    """Compare the files' contents with their digests. once: in the background of the first steps, unless an
    earlier start did and the files are the same by size and time. full: before step 1 of every start."""
    allow_tokenizer_mismatch: bool = False
    """Go on, with a warning, where datasets, or the checkpoint of --init, have another tokenizer."""


class Train(Section):
    """Length, batch and seed of the run."""

    steps: PositiveInt = 1000
    """Optimiser steps in all."""
    global_batch_size: PositiveInt = 32
    """Sequences per optimiser step over the whole job, whatever the number of processes."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass on one process; accumulation follows from it."""
    seq_len: PositiveInt = 256
    """Tokens per training sequence."""
    seed: NonNegativeInt = 1234
    """Determines initial weights, data order and dropout."""
    log_every: PositiveInt = 10
    """Print a line every this many steps; metrics.jsonl has every step."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where each line of metrics.jsonl goes as well; each needs the extra of its name."""
    project: str = "shoal"
    """Project that the run belongs to at wandb and trackio."""
    profile: tuple[PositiveInt, ...] = ()
    """First and last step of a torch profiler trace, written into the run folder; empty means none."""
    recompute: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again to save memory: full keeps only what enters each chunk of layers,
    selective keeps the matrix products and repeats norms, activations and attention."""
    recompute_layers: PositiveInt = 1
    """Layers in each chunk of recompute = full."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the blocks with torch.compile; auto: where the run is long enough to repay the compilation.
    A decoder's loss is always compiled on a GPU, where its separate steps would each read all logits."""
    deterministic: bool = False
    """Only GPU kernels that give the same bits in every run: attention's usual backward adds in any order."""


class Optimizer(Section):
    """Weight decay touches matrices and embeddings, never biases and norms; with sgd it is the L2 term."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon: momentum made orthogonal for the matrices of the blocks, AdamW for everything else."""
    lr: PositiveFloat = 6e-4
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of AdamW's second moment."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Momentum of sgd and muon; muon's is Nesterov's."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay, decoupled but for sgd."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


class Schedule(Section):
    """Linear warm-up to the peak, a decay that ends at min_lr, then min_lr for ever."""

    kind: Literal[
        "cosine",
        "linear",
        "constant",
        "inverse_sqrt",
        "wsd",
        "megatron_cosine",
        "megatron_linear",
        "megatron_constant",
    ] = "cosine"
    """wsd: warm-up, stable at the peak, linear decay at the end. megatron_*: the rule of Megatron-LM of 2021,
    which counts only steps that were taken, starts at 0, and neither ends at min_lr nor stays there."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up, the first with lr = peak / warmup_steps; unset means warmup_fraction."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Warm-up as a fraction of decay_steps, where warmup_steps is not set."""
    decay_steps: NonNegativeInt = 0
    """Step at which the decay reaches min_lr; 0 means train.steps."""
    wsd_decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """Last part of decay_steps in which wsd decays."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of the decay and after it; unset means a tenth of the peak for cosine, linear
    and wsd, 0 for inverse_sqrt. constant and megatron_* do not read it."""


class Precision(Section):
    """Number format of the matrix products; weights and optimiser state are fp32."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the selected device has it natively, else fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are sent between replicas."""
    loss_scale: PositiveFloat | None = None
    """fp16: a fixed loss scale; unset means a dynamic one."""
    initial_scale: PositiveFloat = 65536.0
    """fp16: where the dynamic scale starts."""
    scale_window: PositiveInt = 1000
    """fp16: steps without overflow after which the dynamic scale doubles."""
    hysteresis: PositiveInt = 2
    """fp16: the overflow, counted since the scale last grew, from which on each one halves the scale."""
    min_scale: PositiveFloat = 1.0
    """fp16: the dynamic scale never falls below this; an overflow there is for the guard to judge."""


class Eval(Section):
    """Validation during training, on a fixed sample of the validation split."""

    every: NonNegativeInt = 100
    """Validate every this many steps; 0 means never."""
    sequences: PositiveInt = 64
    """Sequences per validation (fewer where the split holds fewer); the test split uses the same number."""
    seq_len: NonNegativeInt = 0
    """Tokens per validation sequence; 0 means train.seq_len."""
    batch_size: NonNegativeInt = 0
    """Sequences per forward pass on one process; 0 means train.micro_batch_size."""
    prompt: str = ""
    """Text to continue at each validation, on the console and in metrics.jsonl; empty means none."""
    sample_tokens: PositiveInt = 48
    """Length of that continuation, sampled at temperature 0.8."""


class Parallel(Section):
    """How the model and the batch are cut over processes; changes memory and time, never the result."""

    tp: PositiveInt = 1
    """Tensor parallelism: processes that share each layer's matrices, attention heads and the vocabulary."""
    sequence: bool = False
    """With tp: also cut norms, dropout and residual stream, along the sequence."""
    pp: PositiveInt = 1
    """Pipeline parallelism: processes that hold successive layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the micro-batches in a pipeline. interleaved gives each process two parts of the model,
    zero_bubble also splits each backward pass."""
    split: tuple[NonNegativeInt, ...] = ()
    """Layers of each pipeline part, first to last; empty means as even as possible."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO: 0 replicates everything, 1 shards the optimiser's state, 2 also gradients, 3 also weights."""
    dp_shard: NonNegativeInt = 0
    """Processes that share one sharded copy, replicated over the rest; 0 means all that tp and pp leave."""
    offload: bool = False
    """With zero: keep weights, gradients and optimiser state in host memory between their uses."""


class Sync(Section):
    """How data-parallel replicas agree: at every step on gradients or weights, or now and then on weights."""

    strategy: Literal[
        "allreduce",
        "bf16",
        "int8",
        "onebit",
        "topk",
        "powersgd",
        "central_serial",
        "central_parallel",
        "device_sharded",
        "tree_update",
        "model_averaging",
        "block_momentum",
        "diloco",
        "streaming_diloco",
        "async_sgd",
    ] = "allreduce"
    """allreduce, central_*, device_sharded and tree_update give the same result; bf16 to powersgd send less;
    model_averaging to streaming_diloco let replicas train by themselves between agreements; async_sgd never
    waits for the slowest, within sync.staleness steps."""
    algorithm: Literal["backend", "ring", "chunked_ring", "tree", "halving_doubling", "hierarchical"] = (
        "backend"
    )
    """allreduce: who sums, the back end or one of shoal's algorithms."""
    warmup_steps: NonNegativeInt = 0
    """onebit, topk, powersgd, model_averaging to streaming_diloco: first steps by gradients of all replicas
    as they are, such as a tenth of all steps."""
    block: PositiveInt = 64
    """int8, onebit, and with sync.int8: values that share a scale."""
    feedback: float = Field(default=0.1, gt=0.0, le=1.0)
    """onebit, topk: share of all that is held back which joins the next gradient; with 1, as in the
    literature, much of a gradient comes too late, and all at once."""
    density: float = Field(default=0.05, gt=0.0, le=1.0)
    """topk: share of the gradient's values that are sent."""
    rank: PositiveInt = 4
    """powersgd: rank of the matrices that stand for a gradient."""
    every: PositiveInt = 100
    """model_averaging to streaming_diloco: steps of a replica by itself between two agreements (H)."""
    lr: PositiveFloat | None = None
    """The same: outer learning rate; unset means 1, for diloco and streaming_diloco 0.7."""
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    """block_momentum, diloco, streaming_diloco: outer momentum; unset means 1 - 1/replicas for
    block_momentum, 0.9 for the others, whose momentum is Nesterov's."""
    momentum_follows_lr: bool = True
    """The same three: outer momentum is in units of the inner learning rate, and falls with it; false: as in
    the papers, where what it learned at a high rate goes on at a low one."""
    int8: bool = False
    """model_averaging to streaming_diloco: replicas exchange their outer gradients in 8 bits."""
    fragments: PositiveInt = 4
    """streaming_diloco: parts of the model that agree in turn, each every sync.every steps."""
    overlap: NonNegativeInt = 5
    """streaming_diloco: steps for which a part's exchange may be under way."""
    staleness: NonNegativeInt = 4
    """async_sgd: steps that the fastest worker may be ahead of the slowest."""


class Checkpoint(Section):
    """When to save and what to keep."""

    every: NonNegativeInt = 100
    """Save every this many steps, and always at the end; 0 means at the end only."""
    keep_last: PositiveInt = 2
    """Verified checkpoints that are kept, newest first."""
    keep_every: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 means none."""
    keep_every_weights_only: bool = False
    """Drop the optimiser state of checkpoints kept by keep_every once they leave keep_last."""


class Guard(Section):
    """What to do about a loss that is not finite or that spikes; judged on the global loss."""

    nonfinite: Literal["warn", "skip", "stop"] = "stop"
    """A loss or gradient norm that is not finite: go on, leave the step out, or stop without saving it."""
    spike: Literal["warn", "skip", "stop"] = "warn"
    """A loss above spike_factor times its running mean: go on, leave the step out, or stop."""
    spike_factor: float = Field(default=2.0, ge=0.0)
    """How many times the running mean of the loss counts as a spike; 0 turns the check off."""
    late: bool = False
    """Judge a step while the next one runs, so that no step waits for a GPU: a bad step is taken before it is
    found, but nothing is saved after it. For warn and stop; not with fp16, nor with a sync.strategy other
    than allreduce. Where no check needs them (nonfinite = warn, spike_factor = 0), values are read on log
    steps alone."""

    @property
    def checks(self) -> bool:
        """Whether a check needs the loss or the norm of every step."""
        return self.nonfinite != "warn" or self.spike_factor > 0


class Runtime(Section):
    """Where and for how long the job runs; nothing in here changes the result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA devices where there are any."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """What carries tensors between ranks; auto: NCCL on GPUs, gloo on CPUs. mpi needs a torch that has it."""
    threads: NonNegativeInt = 0
    """Threads per worker; 0 means OMP_NUM_THREADS if set, else physical cores / workers."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for another rank before the job is given up, in seconds."""
    hang_s: NonNegativeFloat = 0.0
    """Seconds without progress of any rank after which the job is ended, with a verdict that says which rank
    holds it up and where; 0 means half of timeout_s."""
    max_time_s: NonNegativeFloat = 0.0
    """Save and exit with status 75 after this many seconds; 0 means no limit."""
    slow_link: NonNegativeFloat = 0.0
    """To try a sync.strategy: Mbit/s between the two halves of the replicas; 0: as it is. On CPUs;
    what the back end adds up by itself is not slowed."""
    stop_after: NonNegativeInt = 0
    """Save and exit with status 75 after this step, keeping the schedule of the full run; 0 means never."""


class Config(Section):
    """Everything that determines a run."""

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    sync: Sync = Sync()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    runtime: Runtime = Runtime()
