"""The one place that knows devices, number formats and cores."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from shoal.config.sections import Runtime
from shoal.errors import ConfigError, counted
from shoal.runtime.cores import cpu_flags, physical_cores, processor_name


@dataclass(frozen=True)
class Device:
    """What a rank computes on: its torch device, and the back end that joins such devices."""

    torch_device: torch.device
    backend: str  # for init_process_group: CPU tensors always go over gloo
    name: str

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def synchronise(self) -> None:
        """Wait for queued work, so that a clock read next tells the truth."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def select_device(setting: str, local_rank: int, local_world_size: int) -> Device:
    """Choose the device of a rank; refuse two ranks on one GPU, which NCCL cannot join."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cuda" and not available:
        raise ConfigError(
            "runtime.device = cuda, but torch sees no CUDA device here", hint="use runtime.device = cpu"
        )
    if setting == "cpu" or not available:
        return Device(torch.device("cpu"), "gloo", f"CPU ({processor_name()})")
    if local_world_size > available:
        raise ConfigError(
            f"{local_world_size} ranks on this host, but only {counted(available, 'CUDA device')}: "
            "NCCL cannot join two ranks on one device",
            hint=f"use --nproc {available}, or --runtime.device cpu",
        )
    torch.cuda.set_device(local_rank)
    compute_fp32_in_full()
    device = torch.device("cuda", local_rank)
    return Device(device, "cpu:gloo,cuda:nccl", torch.cuda.get_device_name(device))


def compute_fp32_in_full() -> None:
    """Have GPUs multiply fp32 numbers as fp32: cuDNN takes 10 bits of each (TF32) where it is left alone.

    Through the older of torch's two interfaces, which sets both; seen on torch 2.11 to 2.13.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def compute_reproducibly(on: bool) -> None:
    """Where `on`, choose kernels that add in one order only; before the first matrix product of the process.

    Attention takes such kernels by itself; torch raises a RuntimeError that names an operator without one.
    Where not, a caller's own choice stands.
    """
    if not on:
        return
    torch.use_deterministic_algorithms(True)
    # It finds errors, and costs time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS lets streams share memory


def choose_backend(setting: str, device: Device) -> str:
    """Return what init_process_group is to use for `runtime.backend`; agreements go over gloo anyway."""
    if setting == "auto":
        return device.backend
    if setting == "nccl" and not device.is_cuda:
        raise ConfigError(
            "runtime.backend = nccl, but the ranks compute on CPUs, which NCCL does not join",
            hint="use runtime.backend = auto (or gloo)",
        )
    if setting == "mpi" and not torch.distributed.is_mpi_available():
        raise ConfigError(
            "runtime.backend = mpi, but this torch was built without MPI",
            hint="use runtime.backend = auto (NCCL on GPUs, gloo on CPUs), or a torch built with MPI",
        )
    cpu = "gloo" if setting == "nccl" else setting
    return f"cpu:{cpu},cuda:{setting}" if device.is_cuda else f"cpu:{cpu}"


def bf16_is_native(device: torch.device) -> bool:
    """Say whether bf16 matrix products run in hardware: GPUs from Ampere on, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether matrix products of `dtype` run in hardware; fp16 does on no CPU (seen with torch 2.13)."""
    if dtype == torch.float32 or device.type == "cuda":
        return True
    return dtype == torch.bfloat16 and bf16_is_native(device)


def resolve_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the format of matrix products for `precision.dtype` on `device`.

    A GPU without bf16 refuses it with a ConfigError; a CPU computes all formats, slowly if not in hardware.
    """
    native = bf16_is_native(device)
    if setting == "bf16" and not native and device.type == "cuda":
        raise ConfigError(
            f"precision.dtype = bf16, but {torch.cuda.get_device_name(device)} has no bf16 units",
            hint="use precision.dtype = fp32 (or auto)",
        )
    if setting == "fp16":
        return torch.float16
    return torch.bfloat16 if setting == "bf16" or (setting == "auto" and native) else torch.float32


def share_cores(local_world_size: int) -> None:
    """Give this process, one of several alike on this machine, its share of the cores."""
    torch.set_num_threads(choose_threads(Runtime(), local_world_size)[0])


def choose_threads(runtime: Runtime, local_world_size: int) -> tuple[int, str]:
    """Return the threads of one worker and why: the setting, OMP_NUM_THREADS, or physical cores / workers."""
    if runtime.threads:
        return runtime.threads, "runtime.threads"
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if inherited.isdigit() and int(inherited) > 0:
        return int(inherited), "OMP_NUM_THREADS"
    cores = physical_cores()
    return max(1, cores // local_world_size), f"{cores} physical cores / {local_world_size} workers"
