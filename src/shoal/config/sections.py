"""The typed sections of a configuration. A field's docstring is its documentation and its `--help`, in brief
its first sentence.

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
    """Base of all sections: frozen, without unknown keys, each field documented by its docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Model(Section):
    """Network to train, and the shape of a decoder."""

    network: str = "decoder"
    """Network: decoder (a GPT), the name of a described network (fcn-r, alexnet-r, resnet-56, lstm, ...), or
    a TOML file that describes one. Networks other than decoder use only batch_statistics of the settings
    below; setting any other is an error."""
    batch_statistics: Literal["replica", "synchronised"] = "replica"
    """Samples over which batch normalisation computes mean and variance in training. replica: the micro-batch
    of one replica. synchronised: the micro-batches of all replicas."""
    style: Literal["gpt2", "llama"] = "gpt2"
    """Architecture of the decoder. gpt2: learned positions, LayerNorm, tanh-approximated GELU, biases. llama:
    RoPE, RMSNorm, SwiGLU, no biases."""
    n_layers: PositiveInt = 12
    """Number of transformer blocks."""
    d_model: PositiveInt = 768
    """Width of the residual stream."""
    n_heads: PositiveInt = 12
    """Number of query heads."""
    n_kv_heads: NonNegativeInt = 0
    """Number of key and value heads (grouped-query attention); 0 means n_heads."""
    d_ff: NonNegativeInt = 0
    """Width of the MLP; 0 means 4 x d_model (gpt2), or 8/3 x d_model rounded up to a multiple of 128
    (llama)."""
    max_seq_len: PositiveInt = 1024
    """Maximum sequence length in tokens: the number of learned positions (gpt2), or the length that RoPE is
    meant for (llama)."""
    vocab_size: NonNegativeInt = 0
    """Vocabulary size without padding; 0 means that of the dataset."""
    pad_vocab_multiple: PositiveInt = 128
    """Multiple to which the vocabulary is padded, under every layout; padded rows are masked."""
    tie_embeddings: bool | None = None
    """Share the token embedding with the output head; unset means true for gpt2 and false for llama."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of LayerNorm and RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position angles (llama)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability on embeddings and on the outputs of attention and MLP."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability on attention weights. Above 0, plain attention replaces the fused kernel."""


class Data(Section):
    """Training data."""

    datasets: tuple[str, ...] = ()
    """Dataset folders made by `shoal prepare`; overridden by --data."""
    weights: tuple[PositiveFloat, ...] = ()
    """Sampling weight of each dataset; empty means one pass over all datasets per epoch."""
    reset_documents: bool = False
    """Restrict attention to the token's own document, and restart positions in each document."""
    verify: Literal["once", "full", "off"] = "once"
    """Verification of the data files against their digests. once: during the first steps, in the
    background; files that were verified before and have the same size and time are skipped. full: before the
    first step of every start."""
    allow_tokenizer_mismatch: bool = False
    """Warn, instead of failing, about datasets or an --init checkpoint with a different tokenizer that has
    the same number of ids."""


class Train(Section):
    """Length, batch size and seed of the run."""

    steps: PositiveInt = 1000
    """Optimiser steps in total."""
    global_batch_size: PositiveInt = 32
    """Sequences per optimiser step, over all processes."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass on one process. Gradients are accumulated up to global_batch_size."""
    seq_len: PositiveInt = 256
    """Tokens per training sequence."""
    seed: NonNegativeInt = 1234
    """Random seed for initial weights, data order and dropout."""
    log_every: PositiveInt = 10
    """Steps between printed lines; metrics.jsonl contains every step."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Additional loggers; each must be installed, as in pip install 'shoal[wandb]'."""
    project: str = "shoal"
    """Project name in wandb and trackio."""
    profile: tuple[PositiveInt, ...] = ()
    """First and last step of a torch.profiler trace, written into the run folder; empty means no trace."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation in the backward pass, which saves memory. full: only the input of each chunk
    of layers is kept. selective: matrix products are kept; norms, activations and attention are
    recomputed."""
    recompute_layers: PositiveInt = 1
    """Layers per chunk with recompute = full."""
    recompute_offload: bool = False
    """With recompute = full: keep the input of each chunk in host memory until the backward pass."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compilation of the blocks with torch.compile. auto: if the run is long enough to save more time than
    compilation takes. On GPUs, the loss of a decoder is compiled in every case."""
    deterministic: bool = False
    """Use only GPU kernels with bitwise reproducible results. Attention is slower."""


class Optimizer(Section):
    """Optimiser. Weight decay applies to matrices and embeddings, not to biases and norms."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimiser. muon: orthogonalised momentum for the matrices of the blocks, AdamW for all other
    parameters."""
    lr: PositiveFloat = 6e-4
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay rate of AdamW's second moment."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Momentum of sgd, and Nesterov momentum of muon."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay; decoupled, except with sgd, where it is an L2 penalty."""
    clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""


class Schedule(Section):
    """Learning rate schedule: linear warm-up to the peak, decay to min_lr, then constant min_lr."""

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
    """Learning rate schedule. wsd: warm-up, constant, linear decay at the end. megatron_*: as in Megatron-LM
    (2021): the first learning rate is 0, skipped steps do not count, and min_lr and the constant end do not
    apply."""
    warmup_steps: NonNegativeInt | None = None
    """Number of linear warm-up steps, from peak / warmup_steps to the peak; unset means warmup_fraction."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Linear warm-up as a fraction of decay_steps, if warmup_steps is unset."""
    decay_steps: NonNegativeInt = 0
    """Step at which the decay reaches min_lr; 0 means train.steps."""
    wsd_decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """Final fraction of decay_steps in which wsd decays."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate from the end of the decay; unset means a tenth of the peak (cosine, linear, wsd) or 0
    (inverse_sqrt). Not used by constant and megatron_*."""


class Precision(Section):
    """Number formats. Weights and optimiser state are fp32."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of matrix products. auto: bf16 if the device supports it natively, otherwise fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of gradients that are sent between replicas."""
    loss_scale: PositiveFloat | None = None
    """Constant loss scale (fp16); unset means dynamic."""
    initial_scale: PositiveFloat = 65536.0
    """Initial dynamic loss scale (fp16)."""
    scale_window: PositiveInt = 1000
    """Steps without overflow after which the dynamic loss scale doubles (fp16)."""
    hysteresis: PositiveInt = 2
    """Number of overflows, since the dynamic loss scale last grew, at which it is halved; each further
    overflow halves it again (fp16)."""
    min_scale: PositiveFloat = 1.0
    """Minimum dynamic loss scale (fp16). An overflow at this scale is handled by guard.nonfinite."""


class Eval(Section):
    """Validation during training, on a fixed sample of the validation split."""

    every: NonNegativeInt = 100
    """Steps between validations; 0 means never."""
    sequences: PositiveInt = 64
    """Sequences per validation, or all if the split has fewer; also used for the test split."""
    seq_len: NonNegativeInt = 0
    """Tokens per validation sequence; 0 means train.seq_len."""
    batch_size: NonNegativeInt = 0
    """Sequences per forward pass on one process; 0 means train.micro_batch_size."""
    prompt: str = ""
    """Text to continue at each validation, on the console and in metrics.jsonl; empty means none."""
    sample_tokens: PositiveInt = 48
    """Length of that continuation, sampled at temperature 0.8."""


class Parallel(Section):
    """Parallelism over processes. It changes memory and time, not the result."""

    tp: PositiveInt = 1
    """Tensor parallel size: processes that share the matrices and attention heads of each layer, and the
    vocabulary."""
    sequence: bool = False
    """Sequence parallelism with tp: norms, dropout and the residual stream are divided along the sequence."""
    pp: PositiveInt = 1
    """Pipeline parallel size: processes that hold consecutive layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule. interleaved: two stages per process. zero_bubble: also splits each backward pass."""
    split: tuple[NonNegativeInt, ...] = ()
    """Layers of each pipeline stage, first to last; empty means as even as possible."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage. 0: all replicated. 1: optimiser state is sharded. 2: also gradients. 3: also weights."""
    dp_shard: NonNegativeInt = 0
    """Number of processes over which one copy of the model is sharded; with fewer than all data-parallel
    processes, the copy is replicated (hybrid sharding). 0 means all data-parallel processes."""
    offload: bool = False
    """With zero, keep weights, gradients and optimiser state in host memory between uses."""


class Sync(Section):
    """Synchronisation of data-parallel replicas, at every step or at intervals."""

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
    """Synchronisation strategy. allreduce, central_*, device_sharded and tree_update give the same result;
    bf16, int8, onebit, topk and powersgd compress gradients; model_averaging, block_momentum, diloco and
    streaming_diloco synchronise weights at intervals; async_sgd is asynchronous with bounded staleness."""
    algorithm: Literal["backend", "ring", "chunked_ring", "tree", "halving_doubling", "hierarchical"] = (
        "backend"
    )
    """All-reduce algorithm (allreduce). backend: that of NCCL, gloo or MPI."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps with uncompressed, synchronous gradients, such as a tenth of all steps (onebit,
    topk, powersgd, model_averaging, block_momentum, diloco, streaming_diloco)."""
    block: PositiveInt = 64
    """Number of values that are quantised with one scale (int8, onebit, and sync.int8)."""
    feedback: float = Field(default=0.1, gt=0.0, le=1.0)
    """Fraction of the error feedback that is added to the next gradient (onebit, topk). 1, as in the
    literature, adds all of it at once."""
    density: float = Field(default=0.05, gt=0.0, le=1.0)
    """Fraction of the gradient's values that are sent (topk)."""
    rank: PositiveInt = 4
    """Rank of the gradient approximation (powersgd)."""
    every: PositiveInt = 100
    """Steps between synchronisations (model_averaging, block_momentum, diloco, streaming_diloco)."""
    lr: PositiveFloat | None = None
    """Outer learning rate (model_averaging, block_momentum, diloco, streaming_diloco); unset means 1, or 0.7
    for diloco and streaming_diloco."""
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Outer momentum (block_momentum, diloco, streaming_diloco; Nesterov for the last two); unset means 1 -
    1/replicas for block_momentum, 0.9 for the others."""
    momentum_follows_lr: bool = True
    """Scale the outer momentum with the inner learning rate (block_momentum, diloco, streaming_diloco); the
    papers do not scale it."""
    int8: bool = False
    """Exchange outer gradients in 8 bits (model_averaging, block_momentum, diloco, streaming_diloco)."""
    fragments: PositiveInt = 4
    """Fragments of the model that are synchronised in turn, each every sync.every steps
    (streaming_diloco)."""
    overlap: NonNegativeInt = 5
    """Steps over which the exchange of a fragment overlaps with training (streaming_diloco)."""
    staleness: NonNegativeInt = 4
    """Maximum number of steps by which the fastest worker is ahead of the slowest (async_sgd)."""


class Checkpoint(Section):
    """Checkpoints to save and to keep."""

    every: NonNegativeInt = 100
    """Steps between checkpoints; 0 means only at the end. The last step is always saved."""
    keep_last: PositiveInt = 2
    """Number of newest verified checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep checkpoints whose step is a multiple of this; 0 means none."""
    keep_every_weights_only: bool = False
    """Remove the optimiser state of checkpoints kept by keep_every once they are older than keep_last."""


class Guard(Section):
    """Reaction to a loss or gradient norm that is not finite, and to loss spikes."""

    nonfinite: Literal["warn", "skip", "stop"] = "stop"
    """Action on a loss or gradient norm that is not finite. warn: print a warning and continue. skip: do not
    update the weights. stop: end the run without saving."""
    spike: Literal["warn", "skip", "stop"] = "warn"
    """Action on a loss above spike_factor times its running mean. warn: print a warning and continue. skip:
    do not update the weights. stop: end the run without saving."""
    spike_factor: float = Field(default=2.0, ge=0.0)
    """Ratio of the loss to its running mean that counts as a spike; 0 disables the check."""
    late: bool = False
    """Check each step while the next one runs, so that the GPU does not wait for the host. A bad step is
    detected after it has been applied, and before anything is saved. Requires warn or stop, sync.strategy =
    allreduce, and a format other than fp16. With nonfinite = warn and spike_factor = 0, values are read only
    at log steps."""

    @property
    def checks(self) -> bool:
        """Whether a check needs the loss or the norm of every step."""
        return self.nonfinite != "warn" or self.spike_factor > 0


class Runtime(Section):
    """Device, communication and time limits. They do not change the result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto: CUDA if available."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication back end. auto: NCCL on GPUs, gloo on CPUs. mpi requires a torch build with MPI."""
    threads: NonNegativeInt = 0
    """Threads per worker; 0 means OMP_NUM_THREADS if set, otherwise physical cores / workers."""
    timeout_s: PositiveFloat = 600.0
    """Maximum wait for another rank in seconds, after which the job fails."""
    hang_s: NonNegativeFloat = 0.0
    """Seconds without progress on any rank, after which the job is stopped and the rank at fault reported; 0
    means half of timeout_s."""
    max_time_s: NonNegativeFloat = 0.0
    """Seconds after which to save and exit with status 75; 0 means no limit."""
    slow_link: NonNegativeFloat = 0.0
    """Emulated bandwidth between the two halves of the replicas in Mbit/s, to test a sync.strategy; 0 means
    no limit. Works on CPUs only, and not for the all-reduce of the back end."""
    stop_after: NonNegativeInt = 0
    """Step after which to save and exit with status 75; the schedule stays that of the full run. 0 means
    never."""


class Config(Section):
    """All settings of a run."""

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
