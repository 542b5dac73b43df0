"""`shoal bench`: arguments and help only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.help import CHECK, COMMANDS, OPTIONS
from shoal.runtime.startup import loading

bench = App(
    name="bench",
    group=CHECK,
    group_commands=COMMANDS,
    group_parameters=OPTIONS,
    help="Benchmark collectives, synchronisation strategies and networks.",
)


@bench.command
def collectives(
    *,
    nproc: int = 0,
    transport: Literal["torch", "mpi"] = "torch",
    algorithms: tuple[str, ...] = (),
    sizes: tuple[str, str] = ("1KB", "256MB"),
    dtype: Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"] = "float32",
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Benchmark all-reduce algorithms by size, check their results, and fit latency and bandwidth.

    The columns are those of nccl-tests. algbw: size / time. busbw: algbw x 2(n-1)/n, which can be compared
    with the bandwidth of the link. #wrong: elements that differ from the exact sum.

    Example: shoal bench collectives --nproc 4 --sizes 64KB 64MB --plot collectives.png

    Example: mpirun -n 4 shoal bench collectives --transport mpi

    Parameters
    ----------
    nproc
        Number of processes on this host (default: 2). Under torchrun or srun: those that it
        has started, on all hosts.
    transport
        torch: gloo between CPUs, NCCL between GPUs. mpi: MPI between the ranks that mpirun has started.
    algorithms
        Algorithms: ring (whole tensors, for teaching), chunked_ring, tree, halving_doubling, hierarchical
        (between several hosts), backend (all-reduce of gloo, NCCL or MPI). Default: all.
    sizes
        Smallest and largest tensor in bytes; sizes grow by a factor of four.
    dtype
        Data type of the elements.
    json
        JSON file to write the table to.
    plot
        PNG file for a plot of time over size.
    """
    with loading():
        from shoal.bench.collectives import command

    return command(nproc, transport, algorithms, sizes, dtype, json, plot)


@bench.command
def frameworks(*, install: tuple[str, ...] = (), uninstall: tuple[str, ...] = ()) -> int:
    """List, install or remove the frameworks that `shoal bench networks` compares with PyTorch.

    Each framework gets an environment of its own below ~/.cache/shoal/frameworks, with pinned versions.

    Example: shoal bench frameworks --install jax

    Parameters
    ----------
    install
        Frameworks to install.
    uninstall
        Frameworks whose environments to remove.
    """
    from shoal.bench.environments import command

    return command(install, uninstall)


@bench.command
def networks(
    names: Annotated[tuple[str, ...], Parameter(name="NETWORK", negative=())] = (),
    /,
    *,
    frameworks: tuple[str, ...] = ("pytorch",),
    modes: tuple[str, ...] = ("default", "tuned"),
    batch_sizes: tuple[int, ...] = (64,),
    threads: tuple[int, ...] = (),
    steps: int = 20,
    warmup: int = 5,
    limit: float = 600.0,
    python: tuple[str, ...] = (),
    workers: tuple[int, ...] = (1,),
    data: Path | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
    listing: Annotated[bool, Parameter(name="--list")] = False,
) -> int:
    """Benchmark a training step of classic networks, in frameworks that are checked to compute the same.

    Each row is measured in a separate process. Its parameters, loss and gradient norm for the same weights
    and samples are compared with PyTorch's before its times count. All frameworks train with SGD on the same
    samples in the same order.

    Exit status: 0 done, 1 a row failed or was rejected, 2 bad input.

    Example: shoal bench networks --list

    Example: shoal bench networks fcn-r --batch-sizes 128 1024 --threads 1 2

    Example: shoal bench networks fcn-r --frameworks pytorch jax --data data/digits --steps 50

    Parameters
    ----------
    names
        Networks by name, or TOML files that describe them (default: fcn-r, alexnet-r, resnet-56, lstm).
    frameworks
        Frameworks: pytorch, or jax, tensorflow, paddle, mxnet (install them with `shoal bench frameworks`).
    modes
        default: the framework's default settings. tuned: with its compiler.
    batch_sizes
        Samples per step.
    threads
        Numbers of threads, of all workers together (default: one per physical core).
    steps
        Number of timed steps, after the warm-up.
    warmup
        Number of first steps that are not timed.
    limit
        Seconds after which a row is stopped.
    python
        Python in which a framework is installed, as NAME=PATH (default: the one that runs Shoal).
    workers
        Numbers of workers that share each batch and the threads, by the framework's own data parallelism.
    data
        Dataset of `shoal prepare` to train on (default: random samples). A row is then also rejected if its
        loss differs from PyTorch's in any step; on random samples only the first batch is compared.
    output
        JSON file for all samples with machine and versions, updated after each row. The same command
        continues it.
    listing
        List the networks with their parameters and multiply-adds, and exit.
    """
    with loading():
        from shoal.bench.networks import NetworksOptions, command

    given = names or ("fcn-r", "alexnet-r", "resnet-56", "lstm")
    pythons = dict(pair.partition("=")[::2] for pair in python)
    rows = (given, frameworks, modes, batch_sizes, threads)
    options = NetworksOptions(*rows, steps, warmup, limit, pythons, workers, data)
    return command(options, output, listing=listing)


@bench.command
def gradsync(
    *,
    strategies: tuple[str, ...] = (),
    workers: tuple[int, ...] = (1, 2, 4),
    networks: tuple[str, ...] = ("fcn-r", "lstm", "gpt"),
    link: tuple[str, ...] = ("local",),
    steps: int = 40,
    global_batch_size: int = 0,
    data: tuple[Path, ...] = (),
    runs: Path | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
    plot: Path | None = None,
) -> int:
    """Benchmark training with each synchronisation strategy: step time, bytes sent, waiting time, loss.

    Each row is a separate run of `shoal train` with the same initial weights, data order and global batch
    size. Times are medians; the first steps and a strategy's warm-up are excluded from times and bytes. The
    validation loss is reported after all steps, and after the time that the fastest strategy took.
    Unsupported combinations are listed with the reason.

    Exit status: 0 done, 1 a run failed, 2 bad input.

    Example: shoal bench gradsync --networks gpt --strategies onebit diloco:every=20

    Example: shoal bench gradsync --link local 100mbit --plot sync.png   (as root)

    Parameters
    ----------
    strategies
        Values of sync.strategy, optionally with settings: powersgd:rank=2, diloco:every=50,int8=true
        (default: all). By default, warmup_steps is a tenth of the steps; every is a quarter, at most 100.
    workers
        Numbers of processes. One process trains without a strategy, for comparison.
    networks
        fcn-r (14M parameters), lstm (2M), gpt (1M; the preset tiny).
    link
        Links between the processes. local: one host. 100mbit, 1gbit, ...: two emulated hosts with this
        bandwidth in each direction. hosts: the same without a limit. Emulation needs root, ip and tc.
    steps
        Optimiser steps per run.
    global_batch_size
        Sequences per step over all workers (default: 128, 64 and 16 for the three networks).
    data
        One dataset for all networks, or one per network in their order (default: small generated ones).
    runs
        Folder for the run folders; run the same command again to resume.
    output
        JSON file for the results with machine, versions and all samples, updated after each run.
    plot
        PNG file for a plot of loss over step time, in which areas show the bytes sent.
    """
    with loading():
        from shoal.bench.gradsync import GridOptions, command

    options = GridOptions(strategies, workers, networks, link, steps, global_batch_size, data, runs)
    return command(options, output, plot)
