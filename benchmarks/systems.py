"""What `train_step` compares: one process that trains as one system does and reports the time of its steps.

    python -m benchmarks.systems '{"system": "shoal", ...}'     (the fields of Cell)

Orders come as lines on stdin and answers go as JSON lines to stdout: `run N` takes N steps, `profile N` takes
them under torch's profiler, `end` leaves. The process stands still between orders, so that several can take
turns on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from benchmarks.bare_gpt import Gpt
from benchmarks.c_library import SET, SETTINGS, WAITING
from shoal.config.load import validate
from shoal.config.sections import Config
from shoal.data.dataset import open_dataset
from shoal.data.loader import Loader, Windows
from shoal.runtime.allocator import keep_memory
from shoal.runtime.device import Device, select_device
from shoal.runtime.memory import memory_use
from shoal.runtime.process import Process, join
from shoal.runtime.speed import measured_flops, peak_flops
from shoal.runtime.stop import Stop
from shoal.train.job import build_job
from shoal.train.loop import train
from shoal.train.profiler import StepProfiler
from shoal.train.request import Request

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 1234
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
FOREVER = 1 << 30


@dataclass(frozen=True)
class Workload:
    """A model, a batch and a device: what all systems of a comparison share."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int  # true ids; all systems compute with padded_vocab_size columns
    seq_len: int
    micro_batch_size: int
    accumulation: int
    device: str
    threads: int

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // 128) * 128

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation

    @property
    def step_tokens(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    workload: Workload
    system: str
    dtype: str
    compiled: bool
    with_settings: bool = False  # of the C library, see benchmarks.c_library; Shoal has its own

    @property
    def label(self) -> str:
        return self.system + SET * self.with_settings

    @property
    def environment(self) -> dict[str, str]:
        """Return what the process gets beside this one's own."""
        own = SETTINGS if self.with_settings else WAITING if self.system == "shoal" else {}
        threads = self.workload.threads
        return {**own, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}

    @property
    def name(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return f"{self.workload.name} {self.label} {self.dtype} {mode}"


class Pace:
    """Lets a training loop take the steps that the parent ordered, and times each."""

    def __init__(self, device: Device, dtype: torch.dtype, warmup: int, answers: TextIO) -> None:
        self._device = device
        self._dtype = dtype
        self._left = warmup
        self._answers = answers
        self._marks: list[Any] = []
        self._profile: torch.profiler.profile | None = None

    def step_done(self, loss: Tensor | None = None) -> None:
        """Count a step; when the ordered ones are done, report and wait for the next order."""
        self._mark()
        self._left -= 1
        if self._left > 0:
            return
        self._device.synchronise()
        answer: dict[str, Any] = {"step_s": self._durations()}
        if loss is not None:
            answer["loss"] = loss.item()
        if self._profile is not None:
            self._profile.stop()
            answer["top_operations"] = top_operations(self._profile, self._device.is_cuda)
            self._profile = None
        self._answer(answer)
        self._take_order()

    def _take_order(self) -> None:
        order, _, number = sys.stdin.readline().strip().partition(" ")
        if order not in ("run", "profile"):  # end, or the parent is gone
            self._answer(
                {
                    "peak_bytes": memory_use(self._device).peak_bytes,
                    "matmul_flops": measured_flops(self._device, self._dtype),
                    "peak_flops": peak_flops(self._device, self._dtype),
                }
            )
            os._exit(0)  # no checkpoint at the end
        self._left = int(number)
        if order == "profile":
            self._profile = torch.profiler.profile()
            self._profile.start()
        self._marks = []
        self._mark()

    def _mark(self) -> None:
        """Note this moment; on CUDA in the stream's order, without waiting for queued work."""
        if self._device.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _durations(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.is_cuda:
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def top_operations(profile: torch.profiler.profile, on_cuda: bool, count: int = 12) -> list[dict[str, Any]]:
    """Return the operations (on CUDA: kernels) with the most time of their own and their share of all."""
    times: dict[str, float] = {}
    for event in profile.key_averages():
        if not on_cuda:
            times[event.key] = event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.key] = event.self_device_time_total
    total = sum(times.values())
    first = sorted(times, key=times.__getitem__, reverse=True)[:count]
    return [{"name": name[:80], "share": round(times[name] / total, 4)} for name in first]


class PacedProfiler(StepProfiler):
    """What the training loop calls at the end of each step: here it waits for orders."""

    pace: Pace

    def end(self, step: int, *, stopping: bool) -> None:
        self.pace.step_done()


def run_shoal(cell: Cell, data: Path, folder: Path, make_pace: Callable[[Device], Pace]) -> None:
    """Run the training loop of `shoal train` itself, all that belongs to a step included."""
    work = cell.workload
    sections = {
        "model": {
            "n_layers": work.n_layers,
            "d_model": work.d_model,
            "n_heads": work.n_heads,
            "max_seq_len": work.seq_len,
        },
        "data": {"datasets": [str(data)]},
        "train": {
            "steps": FOREVER,
            "global_batch_size": work.global_batch_size,
            "micro_batch_size": work.micro_batch_size,
            "seq_len": work.seq_len,
            "seed": SEED,
            "compile": "on" if cell.compiled else "off",
        },
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip": CLIP},
        "schedule": {"kind": "constant"},
        "precision": {"dtype": cell.dtype},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "runtime": {"device": work.device, "threads": work.threads},
    }
    train_paced(validate(sections, cell.name), folder, make_pace)


def train_paced(config: Config, folder: Path, make_pace: Callable[[Device], Pace]) -> None:
    """Train a configuration as `shoal train` does, at the pace of the parent's orders."""
    keep_memory()  # as `shoal train` does
    process: Process = join(config.runtime)
    job = build_job(Request(config, folder), process, Stop(process, folder, config.runtime, launched=False))
    profiler = PacedProfiler((), folder, process.rank, job.clock)
    profiler.pace = make_pace(process.device)
    job.profiler = profiler
    train(job)


def run_transformers(cell: Cell, data: Path, folder: Path, make_pace: Callable[[Device], Pace]) -> None:
    """Run a plain loop over transformers' GPT-2 with its own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    work = cell.workload
    config = GPT2Config(
        vocab_size=work.padded_vocab_size,
        n_positions=work.seq_len,
        n_embd=work.d_model,
        n_layer=work.n_layers,
        n_head=work.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )

    def loss_of(model: nn.Module, tokens_bt: Tensor) -> Tensor:
        return model(input_ids=tokens_bt[:, :-1], labels=tokens_bt[:, :-1]).loss

    run_plain_loop(cell, data, GPT2LMHeadModel(config), loss_of, make_pace)


def run_litgpt(cell: Cell, data: Path, folder: Path, make_pace: Callable[[Device], Pace]) -> None:
    """Run a plain loop over litgpt's GPT, sequential blocks and a tied head, with its own chunked loss."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    work = cell.workload
    config = Config(
        name="benchmark",
        block_size=work.seq_len,
        n_layer=work.n_layers,
        n_head=work.n_heads,
        n_embd=work.d_model,
        vocab_size=work.vocab_size,
        padded_vocab_size=work.padded_vocab_size,
        parallel_residual=False,
    )
    gpt = GPT(config)
    gpt.apply(gpt._init_weights)
    gpt.transformer.wte.weight = gpt.lm_head.weight

    def loss_of(model: nn.Module, tokens_bt: Tensor) -> Tensor:
        return chunked_cross_entropy(model(tokens_bt[:, :-1]), tokens_bt[:, 1:])

    run_plain_loop(cell, data, gpt, loss_of, make_pace)


def run_bare(cell: Cell, data: Path, folder: Path, make_pace: Callable[[Device], Pace]) -> None:
    """Run a plain loop over a GPT-2 in bare torch, as short scripts such as nanoGPT's have it."""
    work = cell.workload
    gpt = Gpt(work.n_layers, work.d_model, work.n_heads, work.padded_vocab_size, work.seq_len)

    def loss_of(model: nn.Module, tokens_bt: Tensor) -> Tensor:
        return model(tokens_bt[:, :-1], tokens_bt[:, 1:])

    run_plain_loop(cell, data, gpt, loss_of, make_pace)


def run_plain_loop(
    cell: Cell,
    data: Path,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    make_pace: Callable[[Device], Pace],
) -> None:
    """Train as a short script would: autocast, fused AdamW, clipping, nothing read back from the device."""
    work = cell.workload
    device = select_device(work.device, 0, 1)
    torch.set_num_threads(work.threads or torch.get_num_threads())
    kind = device.torch_device.type
    model.to(device.torch_device).train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    run_model: Any = torch.compile(model) if cell.compiled else model
    pace = make_pace(device)
    for tokens_bt in batches(work, data):
        optimiser.zero_grad(set_to_none=True)
        for micro_bt in tokens_bt.to(device.torch_device).split(work.micro_batch_size):
            with torch.autocast(kind, dtype=DTYPES[cell.dtype], enabled=cell.dtype != "fp32"):
                loss = loss_of(run_model, micro_bt)
            (loss / work.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        pace.step_done(loss)


def batches(work: Workload, data: Path) -> Iterator[Tensor]:
    """Yield the batches that `shoal train` would see, tokens [sequences, seq_len + 1]."""
    split = open_dataset(data).split("train")
    assert split is not None
    loader = Loader(
        Windows([split], work.seq_len),
        weights=(),
        global_batch_size=work.global_batch_size,
        seed=SEED,
        rank=0,
        world_size=1,
    )
    for step in range(1, FOREVER):
        yield torch.from_numpy(loader.batch(step).data)


SYSTEMS = {"shoal": run_shoal, "transformers": run_transformers, "litgpt": run_litgpt, "bare": run_bare}
PACKAGES = ("transformers", "litgpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", type=json.loads)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    wish = parser.parse_args()
    cell = Cell(**wish.cell | {"workload": Workload(**wish.cell["workload"])})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    wish.folder.mkdir(parents=True, exist_ok=True)

    def make_pace(device: Device) -> Pace:
        return Pace(device, DTYPES[cell.dtype], wish.warmup, answers)

    SYSTEMS[cell.system](cell, wish.data, wish.folder, make_pace)


if __name__ == "__main__":
    main()
