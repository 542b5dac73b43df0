"""The `shoal` command: arguments and help only. Handlers import what they need, so that --help is instant."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from shoal.cli.models import evaluate, export, generate, import_, serve
from shoal.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, ShoalError
from shoal.runtime.openmp import sleep_sooner
from shoal.runtime.startup import loading

app = App(
    name="shoal",
    help="Raw text to a trained GPT, from a laptop to many machines, and the run is never lost.",
    version_flags=["--version"],
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),
    suppress_keyboard_interrupt=False,  # __main__ says what stopped a command
)
app.command(
    "shoal.cli.train:train",
    name="train",
    help="Train a GPT; run the same command again to resume.",
    help_epilogue="Example: shoal train tiny --data datasets/my-text --nproc 2 --train.steps 500",
)
app.command(
    "shoal.cli.train:parity",
    name="parity",
    help="Compare layouts with one process, tensor by tensor: rounding, or a bug and where.",
    help_epilogue='Example: shoal parity tiny --layouts "dp2, tp2, pp2, zero3x2"',
)
app.command(
    "shoal.cli.train:advise",
    name="advise",
    help="Say which way to synchronise replicas pays on this link, and which would slow you down.\n\n"
    "Measures the link, a replica's step and what each strategy computes; predicts compute + own work + the "
    "communication that nothing hides. 'pays below': the bandwidth where it breaks even with all-reduce.",
    help_epilogue="Example: shoal advise tiny --nproc 2\n\n"
    "Example: shoal advise gpt2 --layout dp8 --link 100mbit,1ms\n\n"
    "Example: shoal advise runs/first --layout dp4 --link 1gbit --sync.every 50",
)
app.command(generate)
app.command(evaluate)
app.command(serve)
app.command(export)
app.command(import_, name="import")


@app.command
def doctor(
    *,
    json: Path | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    node_rank: int | None = None,
    data: tuple[Path, ...] = (),
) -> int:
    """Check this machine, or whether several can train together; say what to do.

    Example: shoal doctor --json doctor.json

    Example: shoal doctor --nnodes 2 --rdzv 10.0.0.1:29400 --data datasets/mine   (on both hosts, within 30 s)

    Parameters
    ----------
    json
        Write the findings to this file, too.
    nnodes
        Hosts to check together; run the same command on each, in the folder where they will train.
    rdzv
        HOST:PORT at which the hosts meet: an address of the first one, with a port that is free there.
    node_rank
        Number of this host, from 0. Left out, the host that owns the address of --rdzv is 0.
    data
        Dataset folders to look at; they should be the same on all hosts.
    """
    from shoal.doctor.command import doctor as run
    from shoal.runtime.network import several_hosts

    return run(json, several_hosts(nnodes, rdzv, node_rank), data)


@app.command
def prepare(
    inputs: Annotated[tuple[str, ...], Parameter(name="INPUT", negative=())],
    /,
    *,
    output: Path,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    split: str = "949,50,1",
    seed: int = 1234,
    text_key: str = "text",
    delim: str | None = None,
    separator: str | None = None,
    limit: int | None = None,
    validation: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    test: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    max_rejected_share: float = 0.05,
    workers: int | None = None,
    json: Path | None = None,
) -> None:
    """Turn text, or labelled examples, into a dataset: plain files and a manifest in one folder.

    Stop it at any time and run the same command again: it continues. Run it once more: it does nothing.

    Example: shoal prepare stdlib --output datasets/stdlib --vocab-size 4096

    Example: shoal prepare corpus/*.jsonl.gz notes/ --output datasets/mine --tokenizer gpt2 --text-key body

    Example: shoal prepare mnist/ --output datasets/mnist   (then: shoal train fcn-r --data datasets/mnist)

    Parameters
    ----------
    inputs
        Files, folders or quoted globs of .txt, .jsonl, .jsonl.gz, .jsonl.zst, .csv, .tsv, .parquet; or
        `stdlib`, the source text of this Python's standard library (12 MB, offline). Labelled examples:
        .npz files (arrays x and y, or x_train, y_train, x_test, y_test), a folder of MNIST's IDX files, or
        `random-images`, made up for timing.
    output
        Folder of the dataset; new, or one that this command began.
    tokenizer
        bpe (trained on this text), gpt2, bytes, a tokenizer.json, a SentencePiece .model, or a folder
        with one of them or with vocab.json and merges.txt.
    vocab_size
        Ids of a trained bpe; 32000 if left out.
    split
        Weights of train, validation and test, by document; by tokens where documents are too few.
    seed
        Chooses which documents are held out, and the sample that a bpe is trained on.
    text_key
        Key, or column, that holds the text.
    delim
        Character between CSV fields; a comma, or a tab for .tsv, if left out.
    separator
        Text between the documents of a .txt file (\\n is a newline); each file is one document if left out.
    limit
        Take only the first so many documents.
    validation
        Files of the validation split, instead of a part of INPUT.
    test
        Files of the test split, instead of a part of INPUT.
    max_rejected_share
        Stop if more than this share of the documents is broken; they are listed in rejects/.
    workers
        Processes; as many as there are cores if left out. Never changes the result.
    json
        Write the manifest and the speed to this file, too.
    """
    from shoal.data.prepare.options import PrepareOptions
    from shoal.data.prepare.run import prepare_command

    chosen = PrepareOptions(
        inputs, output, tokenizer, vocab_size, split, seed, text_key, delim, separator, limit, validation,
        test, max_rejected_share, workers,
    )  # fmt: skip
    prepare_command(chosen, json)


checkpoint = App(name="checkpoint", help="List, verify, remove or bring together the checkpoints of a run.")
app.command(checkpoint)


@checkpoint.command
def ls(path: Path, *, json: Path | None = None) -> int:
    """Print one line a checkpoint, newest first; every file is read and compared with its digest.

    Example: shoal checkpoint ls runs/first

    Parameters
    ----------
    path
        A run folder, its checkpoints folder, or one checkpoint.
    json
        Write the list to this file, too.
    """
    from shoal.cli.checkpoint import list_checkpoints

    return list_checkpoints(path, json)


@checkpoint.command
def verify(path: Path) -> int:
    """Say what is wrong with each checkpoint, and take back what was set aside and is whole.

    Exit status: 0 all that are in use are good, 1 one is not, or none is in use.

    Example: shoal checkpoint verify runs/first/checkpoints/step-00000600

    Parameters
    ----------
    path
        A run folder, its checkpoints folder, or one checkpoint.
    """
    from shoal.cli.checkpoint import verify_checkpoints

    return verify_checkpoints(path)


@checkpoint.command
def rm(path: Path, *, force: bool = False) -> int:
    """Remove one checkpoint; the newest good one only with --force.

    Example: shoal checkpoint rm runs/first/checkpoints/step-00000600

    Parameters
    ----------
    path
        The checkpoint's folder.
    force
        Remove it even if it is the newest good one.
    """
    from shoal.cli.checkpoint import remove_checkpoint

    return remove_checkpoint(path, force)


@checkpoint.command
def gather(path: Path, folders: tuple[Path, ...], /) -> int:
    """Make a checkpoint whole whose parts were kept by hosts without a shared folder.

    Copy the checkpoints of the other hosts to this one first, into folders of their own.

    Example: shoal checkpoint gather runs/first copies/south copies/east

    Parameters
    ----------
    path
        A run folder (its newest checkpoint) or a checkpoint: this host's part, which becomes whole.
    folders
        Where the other hosts' parts are: their run folders, checkpoints folders or checkpoints.
    """
    from shoal.cli.checkpoint import gather_parts

    return gather_parts(path, folders)


dataset = App(name="dataset", help="List, verify or show the datasets of `shoal prepare`.")
app.command(dataset)


@dataset.command(name="ls")
def ls_datasets(path: Path = Path("datasets"), *, json: Path | None = None) -> int:
    """Print one line a dataset: what it holds, and whether its files have the sizes that they should.

    Example: shoal dataset ls datasets

    Parameters
    ----------
    path
        A dataset, or a folder of datasets.
    json
        Write the list to this file, too.
    """
    from shoal.data.commands import list_datasets

    return list_datasets(path, json)


@dataset.command(name="verify")
def verify_datasets(path: Path, *, json: Path | None = None) -> int:
    """Read every file again and say what is wrong; exit with 1 where anything is.

    Example: shoal dataset verify datasets/mine

    Parameters
    ----------
    path
        A dataset, or a folder of datasets.
    json
        Write what was found to this file, too.
    """
    from shoal.data.commands import verify_datasets as run

    return run(path, json)


@dataset.command(name="show")
def show_dataset(
    path: Path,
    *,
    doc: int | None = None,
    split: Literal["train", "validation", "test"] = "train",
    json: Path | None = None,
) -> int:
    """Print a dataset's splits, vocabulary, tokenizer and options, and a document's text and source.

    Example: shoal dataset show datasets/mine --doc 0

    Parameters
    ----------
    path
        The dataset's folder.
    doc
        Number of a document of the split, from 0 (default: the beginning of the first one).
    split
        Which split the document is of.
    json
        Write it to this file, too.
    """
    from shoal.data.commands import show_dataset as run

    return run(path, doc, split, json)


bench = App(name="bench", help="Measure how replicas, networks and frameworks really perform.")
app.command(bench)


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
    """Time each all-reduce by size, beside the back end's own; check its result; fit latency and bandwidth.

    Columns are those of nccl-tests: algbw is the tensor's bytes a second, busbw what the best algorithm
    would send from each rank in that time, #wrong the elements that are not the exact sum.

    Example: shoal bench collectives --nproc 4 --sizes 64KB 64MB --plot collectives.png

    Example: mpirun -n 4 shoal bench collectives --transport mpi

    Parameters
    ----------
    nproc
        Processes on this machine; 2 if left out. Under torchrun or srun theirs are used, on all hosts.
    transport
        torch: gloo between CPUs, NCCL between GPUs. mpi: the ranks that mpirun has started.
    algorithms
        Any of ring (whole tensors, as a first exercise), chunked_ring, tree, halving_doubling, hierarchical,
        backend (the library's own). All if left out; hierarchical between several hosts only.
    sizes
        Least and most bytes of a tensor; each size between is four times the one before.
    dtype
        Format of the elements.
    json
        Write the table to this file, too.
    plot
        Draw times over sizes into this PNG.
    """
    with loading():
        from shoal.bench.collectives import command

    return command(nproc, transport, algorithms, sizes, dtype, json, plot)


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
    """Train with each way for replicas to agree: seconds a mini-batch, bytes, waiting, loss.

    Each row of the tables is a `shoal train` of its own, with the same weights at the start, the same data
    order and the same global batch. Times are medians; the first steps, and a strategy's warm-up, count for
    neither times nor bytes. Loss is that of the validation data, after all steps and after as many seconds
    as the fastest took. What the rules refuse stands in its table with the reason.
    Exit status: 0 done, 1 a training failed, 2 bad input.

    Example: shoal bench gradsync --networks gpt --workers 2 --strategies allreduce onebit diloco:every=20

    Example: shoal bench gradsync --link local 100mbit --output gradsync.json --plot gradsync.png   (as root)

    Parameters
    ----------
    strategies
        Names of sync.strategy, each with settings if need be: powersgd:rank=2, diloco:every=50,int8=true.
        All if left out. Not said: warmup_steps is a tenth of the steps, every a quarter, at most 100.
    workers
        Numbers of processes. One trains without strategies, for comparison.
    networks
        fcn-r (14M parameters), lstm (2M with the data made here), gpt (the preset tiny, 1M).
    link
        local: all on this host. 100mbit, 1gbit, ...: two hosts, made of network namespaces, with so much
        between them each way; hosts: as much as there is. This takes root, ip and tc.
    steps
        Optimiser steps of each training.
    global_batch_size
        Samples a step, whatever the number of workers; 128, 64 and 16 for the three networks if left out.
    data
        A dataset for each network, in the same order, or one for all; small ones are made if left out.
    runs
        Keep the run folders here; the same command goes on with them where it was stopped.
    output
        Write the record to this file: machine, versions, every sample. It grows as trainings end.
    plot
        Draw loss over seconds a mini-batch, with bytes as area, into this PNG.
    """
    with loading():
        from shoal.bench.gradsync import GridOptions, command

    options = GridOptions(strategies, workers, networks, link, steps, global_batch_size, data, runs)
    return command(options, output, plot)


@app.command
def quickstart(*, output: Path = Path("quickstart")) -> None:
    """See it all in three minutes, offline: real text, a trained GPT, a killed worker, the recovery.

    Example: shoal quickstart --output /tmp/quickstart

    Parameters
    ----------
    output
        Folder for the dataset and the two runs.
    """
    with loading():
        from shoal.quickstart import quickstart as run

    run(output)


def main() -> None:
    """Run one command; an error becomes a sentence on stderr and an exit status."""
    sleep_sooner()  # torch is not loaded yet
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character is no reason to fail
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = app(result_action="return_value", print_error=False, exit_on_error=False)
    except CycloptsError as error:
        print(_usage_error(error), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `shoal ... | head`
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    sys.exit(status if isinstance(status, int) else EXIT_DONE)


def _usage_error(error: CycloptsError) -> str:
    """Word a mistake on the command line like every other error."""
    text = str(error)
    problems: list[Any] = getattr(error.__cause__, "errors", list)()  # pydantic's, which is not imported here
    if problems:
        text = "; ".join(
            f"--{'.'.join(map(str, p['loc']))} {p['input']}: {p['msg'].lower()}" for p in problems
        )
    return f"error: {text}\n  hint: see {' '.join(['shoal', *(error.command_chain or ())])} --help"
