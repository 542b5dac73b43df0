"""`shoal bench`: arguments and help only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.help import CHECK, COMMANDS, HELP_FLAGS, OPTIONS
from shoal.runtime.startup import loading

bench = App(
    name="bench",
    group=CHECK,
    group_commands=COMMANDS,
    group_parameters=OPTIONS,
    help="Benchmark collectives, synchronisation strategies, layouts, networks, and the machine itself.",
)

bench.command(
    "shoal.cli.train:layouts",
    name="layouts",
    help_flags=HELP_FLAGS,
    help="Benchmark one training under several layouts: step time by phase, memory, loss, perplexity.\n\n"
    "Each layout is a separate run of `shoal train` with the same initial weights, data order and batch. "
    "Times are means over the middle half of the steps after the warm-up. A layout that is not supported, or "
    "that fails, is listed with the reason.\n\n"
    "Exit status: 0 done, 1 a run failed or no layout is supported, 2 bad input.",
    help_epilogue='Example: shoal bench layouts tiny --layouts "1, dp2, tp2, zero3x2" --plot cuts.png\n\n'
    'Example: shoal bench layouts my.toml --data datasets/my-text --layouts "1, dp2, tp2"',
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
def ceilings(
    *,
    threads: tuple[int, ...] = (),
    matrix_size: int = 0,
    memory: str = "256MB",
    seconds: float = 0.5,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
) -> int:
    """Benchmark what bounds a training step: matrix products, memory, copies to the GPU, the link.

    Rates are those of the median of the repeats. copy (a = b) and triad (a = b + 2 c) count the bytes of each
    array once. The link is fitted to all-reduces between two processes of this host, or two GPUs.

    Exit status: 0 done, 1 a rate could not be measured, 2 bad input.

    Example: shoal bench ceilings --threads 1 2 --output ceilings.json

    Parameters
    ----------
    threads
        Numbers of threads on the CPU (default: one per physical core).
    matrix_size
        Rows and columns of the matrices (default: 1024 on CPUs, 256 in formats that they lack, 8192 on GPUs).
    memory
        Size of an array to copy; choose one that does not fit into the caches.
    seconds
        Time for the repeats of each row.
    output
        JSON file for the rates, with machine, versions and all samples.
    """
    with loading():
        from shoal.bench.ceilings import command
        from shoal.bench.sizes import parse_bytes

    return command(threads, seconds, matrix_size, parse_bytes(memory), output)


@bench.command
def products(
    *,
    gemm: tuple[int, int, int] = (1024, 2048, 26752),
    conv: tuple[int, int, int, int] = (16, 96, 256, 27),
    kernels: tuple[int, ...] = (1, 3, 5, 7, 11),
    threads: int = 0,
    seconds: float = 2.0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
) -> int:
    """Benchmark ways to compute a matrix product, a gradient with its update, and convolutions, in fp32.

    A row is rejected if its result differs from a float64 reference. GFLOP/s are computed from the operation
    count of the direct algorithm, also for FFT convolutions.

    Exit status: 0 done, 1 a row failed or was rejected, 2 bad input.

    Example: shoal bench products --gemm 256 512 1024 --kernels 3 11

    Parameters
    ----------
    gemm
        Samples, outputs and inputs of a fully connected layer: A (samples x inputs) times the transpose of
        B (outputs x inputs).
    conv
        Samples, input channels, output channels, and rows (= columns) of the images.
    kernels
        Odd sizes of the kernels.
    threads
        Number of threads on the CPU (default: one per physical core).
    seconds
        Time for the repeats of each row.
    device
        Device to compute on.
    output
        JSON file for all samples, with machine and versions.
    """
    with loading():
        from shoal.bench.products import command

    return command(gemm, conv, kernels, threads, seconds, device, output)


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
    device: Literal["cpu", "cuda"] = "cpu",
    python: tuple[str, ...] = (),
    workers: tuple[int, ...] = (1,),
    data: Path | None = None,
    config: Path | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
    listing: Annotated[bool, Parameter(name="--list")] = False,
) -> int:
    """Benchmark a training step of classic networks in frameworks verified to compute the same result.

    Each row is measured in a separate process. A row is rejected if its number of parameters, loss or
    gradient norm, for the same weights and samples, differs from PyTorch's. All frameworks train with SGD on
    the same samples in the same order.

    Exit status: 0 done, 1 a row failed or was rejected, 2 bad input.

    Example: shoal bench networks fcn-r --batch-sizes 128 1024 --threads 1 2

    Example: shoal bench networks fcn-r --frameworks pytorch jax --data data/digits --steps 50

    Parameters
    ----------
    names
        Networks by name, or TOML files that describe them (default: fcn-r, alexnet-r, resnet-56, lstm).
    frameworks
        Frameworks: pytorch; jax, tensorflow, paddle, mxnet (install them with `shoal bench frameworks`);
        caffe, cntk (name them with --python).
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
    device
        cuda: on a GPU, in PyTorch and JAX only.
    python
        Python in which a framework is installed, as NAME=PATH (default: the one that runs Shoal). For
        Caffe: its program.
    workers
        Numbers of workers that share each batch and the threads, by the framework's own data parallelism.
    data
        Dataset of `shoal prepare` to train on (default: random samples). A row is then also rejected if its
        loss differs from PyTorch's in any step; on random samples only the first batch is compared.
    config
        Configuration of dlbench (.config) to take networks, tools, batch sizes and threads from.
    output
        JSON file for all samples with machine and versions, updated after each row. The same command
        continues it.
    listing
        List the networks with their parameters and multiply-adds, and exit.
    """
    with loading():
        from shoal.bench.networks import NetworksOptions, command

    given = names or (() if config else ("fcn-r", "alexnet-r", "resnet-56", "lstm"))
    pythons = dict(pair.partition("=")[::2] for pair in python)
    rows = (given, frameworks, modes, batch_sizes, threads)
    options = NetworksOptions(*rows, steps, warmup, limit, pythons, device, workers=workers, data=data)
    if config is not None:
        from shoal.bench.legacy import configured

        options = configured(options, config)
    return command(options, output, listing=listing)


@bench.command
def convergence(
    names: Annotated[tuple[str, ...], Parameter(name="NETWORK", negative=())] = (),
    /,
    *,
    data: tuple[Path, ...] = (),
    epochs: int = 10,
    seeds: int = 3,
    batch_size: int = 128,
    workers: tuple[int, ...] = (1,),
    lr: float | None = None,
    runs: Path | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
    plot: Path | None = None,
) -> int:
    """Train classic networks with several seeds: training loss and test accuracy by epoch and by second.

    Each seed is a separate run of `shoal train`, with its own initial weights and data order. The accuracy is
    that of the dataset's validation split, evaluated after each epoch. Seconds count training steps only.

    Exit status: 0 done, 1 a run failed, 2 bad input.

    Example: shoal bench convergence fcn-r --epochs 5 --workers 1 2 --plot convergence.png

    Parameters
    ----------
    names
        Networks by name, or TOML files that describe them (default: fcn-r, alexnet-r).
    data
        One dataset for all networks, or one per network in their order (default: scikit-learn's digits, or
        Python source text for a network of tokens). Random images are rejected.
    epochs
        Passes over the training split.
    seeds
        Number of runs of each network, with the seeds 1, 2, ...
    batch_size
        Samples per step over all workers.
    workers
        Numbers of processes.
    lr
        Learning rate (default: that of the network's preset).
    runs
        Folder for the run folders; run the same command again to resume.
    output
        JSON file for all curves with machine and versions, updated after each run.
    plot
        PNG file for a plot of the means; bands show all seeds.
    """
    with loading():
        from shoal.bench.convergence import ConvergenceOptions, command

    networks, settings = names or ("fcn-r", "alexnet-r"), {} if lr is None else {"optimizer.lr": str(lr)}
    options = ConvergenceOptions(networks, data, epochs, seeds, workers, batch_size, settings, runs)
    return command(options, output, plot)


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
    validation loss is reported twice: after all steps, and at the time at which the fastest strategy had
    finished. Unsupported combinations are listed with the reason.

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
        fcn-r (14M parameters), alexnet-r (0.1M), resnet-56 (0.9M), lstm (2M), gpt (1M; the preset tiny).
    link
        Links between the processes. local: one host. 100mbit, 1gbit, ...: two emulated hosts with this
        bandwidth in each direction. hosts: two emulated hosts without a bandwidth limit. Emulation needs
        root, ip and tc.
    steps
        Optimiser steps per run.
    global_batch_size
        Sequences or images per step over all workers (default: fcn-r and alexnet-r 128, lstm 64, resnet-56
        32, gpt 16).
    data
        One dataset for all networks, or one per network in their order (default: small generated ones).
    runs
        Folder for the run folders; run the same command again to resume.
    output
        JSON file for the results with machine, versions and all samples, updated after each run.
    plot
        PNG file for a plot of loss over step time, in which areas show the bytes sent, and of loss over
        epochs and seconds.
    """
    with loading():
        from shoal.bench.gradsync import GridOptions, command

    options = GridOptions(strategies, workers, networks, link, steps, global_batch_size, data, runs)
    return command(options, output, plot)


@bench.command
def report(
    records: Annotated[tuple[Path, ...], Parameter(name="RECORD", negative=())],
    /,
    *,
    output: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Write one self-contained HTML page, or a CSV file, from records of the other benchmarks.

    Above each plot is one sentence, computed from the record, that states the result. Rows whose times
    overlap from the 5th to the 95th percentile are not called different. Failed and rejected rows are listed
    with the reason.

    Example: shoal bench report networks.json gradsync.json --output report.html

    Parameters
    ----------
    records
        JSON records of `shoal bench networks`, `gradsync` and `collectives`.
    output
        HTML file to write.
    csv
        CSV file to write: a line for each row, with median, p5 and p95.
    """
    with loading():
        from shoal.bench.report import command

    return command(records, output, csv)


@bench.command
def compare(
    a: Annotated[Path, Parameter(name="A")],
    b: Annotated[Path, Parameter(name="B")],
    /,
    *,
    fail_above: float | None = None,
) -> int:
    """Compare two records row by row: faster, slower, or no difference beyond the noise.

    The verdict comes from a 99 % bootstrap interval of the ratio of medians. Differences in machine, versions
    and settings are printed as warnings.

    Exit status: 0 done, 1 a row is slower than --fail-above, 2 bad input.

    Example: shoal bench compare before.json after.json --fail-above 1.05

    Parameters
    ----------
    a
        Record to compare with.
    b
        Record that is judged.
    fail_above
        Exit with status 1 if the whole interval of a row's ratio is above this.
    """
    with loading():
        from shoal.bench.compare import command

    return command(a, b, fail_above)


@bench.command(name="all")
def tour(*, output: Path, minutes: float = 10.0) -> int:
    """Benchmark this machine within a time limit: which framework, how many threads, which batch size.

    Runs `networks` with the installed frameworks, `collectives` and a small `gradsync`, and writes their
    records and report.html to a folder. Benchmarks that do not fit into the time limit are listed. Run the
    same command again to continue with them.

    Exit status: 0 done, 1 a stage failed, 2 bad input.

    Example: shoal bench all --minutes 10 --output tour

    Parameters
    ----------
    output
        Folder for records, logs and report.html.
    minutes
        Time limit.
    """
    with loading():
        from shoal.bench.tour import command

    return command(output, minutes)
