"""Decide whether to compile the training step, and compile it block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.models.counts import flops_per_token
from shoal.models.decoder import Block, Context, Decoder
from shoal.models.shape import ModelShape
from shoal.runtime.compiler import missing_compiler
from shoal.runtime.process import Process

# Work of one rank from which compilation pays. CPU, per thread: seen for 6 layers x 384 on two
# threads, some 180,000 tokens of 180 MFLOP. CUDA: some 20 s of compilation at a third saved of 2e14 FLOP/s.
_REPAID_FLOPS = {"cpu": 1.6e13, "cuda": 8e15}


@dataclass(frozen=True)
class Compilation:
    """Decision of all ranks, with the reason for the run summary."""

    on: bool  # the blocks and the loss
    reason: str
    loss: bool = False


def decide(config: Config, shape: ModelShape | None, process: Process) -> Compilation:
    """Decide what to compile. Collective over the world.

    The length of the whole run counts, not what is left of it, so that a resumed run computes like the
    undisturbed one. A decoder's loss is compiled on every GPU that has a compiler: in separate kernels the
    loss of 32 x 1024 tokens over 50,304 ids would move some 90 GB, compiled 10.

    Raises:
        ConfigError: Compilation is required and not possible.
    """
    blocks = _decide_blocks(config, shape, process)
    loss = blocks.on
    if not loss and shape is not None and process.device.is_cuda:
        loss = not process.any(missing_compiler(process.device.torch_device) is not None)
    return replace(blocks, loss=loss)


def _decide_blocks(config: Config, shape: ModelShape | None, process: Process) -> Compilation:
    setting, device = config.train.compile, process.device.torch_device
    if config.data.reset_documents and device.type == "cuda" and (missing := missing_compiler(device)):
        raise ConfigError(
            f"data.reset_documents = true has its attention kernel compiled on a GPU, but {missing}",
            hint="install it, or use data.reset_documents = false",
        )
    if shape is None:
        return Compilation(False, "only decoders are compiled")
    if setting == "off" or config.parallel.pp > 1:
        return Compilation(False, "train.compile = off" if setting == "off" else "pipelines are not compiled")
    work = _work(config, shape, process)
    repaid = _REPAID_FLOPS[device.type] * (process.threads if device.type == "cpu" else 1)
    if setting == "auto" and work < repaid:
        return Compilation(
            False, f"auto: {work:.1e} FLOP a rank; compiling pays from about {repaid:.1e} on this device"
        )
    missing = missing_compiler(device)
    if process.any(missing is not None):
        missing = missing or "another rank's machine lacks a compiler"
        if setting == "on":
            raise ConfigError(
                f"train.compile = on, but {missing}", hint="install it, or use train.compile = off (or auto)"
            )
        return Compilation(False, f"auto: it would pay, but {missing}")
    reason = "train.compile = on" if setting == "on" else f"auto: {work:.1e} FLOP a rank repay it"
    return Compilation(True, f"{reason}; the first step waits for the compiler")


def compile_blocks(model: Decoder) -> None:
    """Compile the blocks in place, for training only: without gradients they run uncompiled.

    Module names, parameters and hooks stay the same. All blocks share one piece of code, which is compiled
    once.
    """
    # DDP would split each block's graph by its buckets, and rejects recompute and flex attention. Blocks
    # are small enough for communication to overlap. Seen with torch 2.11 to 2.13.
    torch._dynamo.config.optimize_ddp = False
    for block in model.blocks.values():
        setattr(block, "forward", _TrainingForward(cast(Block, block)))  # noqa: B010


class _TrainingForward:
    """Forward of a block: compiled if gradients are recorded, else uncompiled."""

    def __init__(self, block: nn.Module) -> None:
        self._plain = block.forward
        self._compiled = torch.compile(block.forward, dynamic=False)

    def __call__(self, x_btd: Tensor, context: Context) -> Tensor:
        run = self._compiled if torch.is_grad_enabled() else self._plain
        return cast(Tensor, run(x_btd, context))


def _work(config: Config, shape: ModelShape, process: Process) -> float:
    """Return the floating-point operations of one rank in the whole run."""
    train = config.train
    tokens = train.steps * train.global_batch_size * train.seq_len / process.world_size
    return tokens * flops_per_token(shape, train.seq_len)
