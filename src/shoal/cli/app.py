"""The `shoal` command: arguments and help only. Handlers import what they need, so that --help is instant."""

from __future__ import annotations

import sys
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from cyclopts import App, CycloptsError, Group, Parameter

from shoal.cli.bench import bench
from shoal.cli.help import CHECK, COMMANDS, HELP_FLAGS, OPTIONS, SHORT, HelpPage, usage_error
from shoal.cli.models import evaluate, export, generate, import_, serve
from shoal.cli.prepare import explain, prepare
from shoal.cli.setup import completion, config
from shoal.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, ShoalError
from shoal.runtime.openmp import sleep_sooner
from shoal.runtime.startup import loading

_DATA = Group("Prepare and train", sort_key=1)
_MODEL = Group("Use a model", sort_key=2)
_OTHER = Group("Other", sort_key=4)

app = App(
    name="shoal",
    help="Train a GPT from raw text, on a laptop or a cluster.\n\nStart with `shoal quickstart`.",
    version_flags=["--version"],
    help_formatter=HelpPage(),
    group_commands=_OTHER,
    group_parameters=OPTIONS,
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),
    suppress_keyboard_interrupt=False,  # __main__ says what stopped a command
)
app.command(
    "shoal.cli.train:train",
    name="train",
    group=_DATA,
    help_flags=HELP_FLAGS,
    help_formatter=HelpPage(hidden=SHORT.values()),
    help="Train a GPT or a classic network; run the same command again to resume.\n\n"
    "The command is the same for one process, several (--nproc), several hosts (--nnodes, --rdzv), torchrun "
    "and Slurm. The preset or file overrides the defaults shown here; `shoal config tiny` prints its "
    "values.\n\n"
    "Exit status: 0 done, 1 failed, 2 bad input, 75 stopped on request with everything saved.",
    help_epilogue="Example: shoal train tiny --data datasets/my-text -o runs/first --steps 500\n\n"
    "Example: shoal train my.toml --data datasets/my-text --nproc 4 --lr 3e-4\n\n"
    "Example: shoal train tiny --data datasets/my-text --model.n-layers 6",
)
app.command(
    "shoal.cli.train:parity",
    name="parity",
    group=CHECK,
    help_flags=HELP_FLAGS,
    help="Compare training under several layouts with one process, tensor by tensor.\n\n"
    "Each difference is compared with the rounding error, which is measured by summing in another order. "
    "Runs in fp32 on the CPU unless precision.dtype and runtime.device are set.\n\n"
    "Exit status: 0 all differences are rounding, 1 a difference is larger or a rank failed, 2 bad input.",
    help_epilogue='Example: shoal parity tiny --layouts "dp2, tp2, pp2, zero3x2" --json parity.json',
)
app.command(
    "shoal.cli.train:advise",
    name="advise",
    group=CHECK,
    help_flags=HELP_FLAGS,
    help="Recommend a synchronisation strategy for a link, from measurements.\n\n"
    "Measures the link, the step of one replica and the computation of each strategy. The predicted step "
    "time is the sum of the replica's own step, the computation of the strategy, and the communication that "
    "does not overlap with them. The column 'pays below' is the bandwidth below which the strategy is faster "
    "than all-reduce.",
    help_epilogue="Example: shoal advise tiny --nproc 2   (between processes of this host)\n\n"
    "Example: shoal advise gpt2 --layout dp8 --link 100mbit,1ms   (for other hosts)\n\n"
    "Example: shoal advise runs/first --layout dp4 --link 1gbit   (its step times)\n\n"
    "Example: torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 "
    "-m shoal advise gpt2 --data DATASET   (the link between two hosts; run it on each)",
)
app.command(
    "shoal.cli.plan:plan",
    name="plan",
    group=_DATA,
    help_flags=HELP_FLAGS,
    help="Plan a run: does it fit, how long does it take, which layout, and why not the others.\n\n"
    "Predicts the memory of each rank and the time of a step, and searches all layouts of the devices.\n\n"
    "Exit status: 0 it fits, 1 it does not, 2 bad input, or no layout fits.",
    help_epilogue="Example: shoal plan gpt2 --data datasets/my-text --epochs 1   (on this machine)\n\n"
    "Example: shoal plan gpt2-xl --gpu h100 --gpus 8 --nodes 4 --link 400gbit --tokens 3e11\n\n"
    'Example: shoal plan gpt2 --gpu a100-80 --gpus 8 --layout "tp2*dp4" --plot memory.png',
)
app.command(prepare, group=_DATA)
app.command(config, group=_DATA)
app.command(generate, group=_MODEL)
app.command(evaluate, group=_MODEL)
app.command(serve, group=_MODEL)
app.command(export, group=_MODEL)
app.command(import_, name="import", group=_MODEL)
app.command(completion)


@app.command(group=CHECK)
def doctor(
    *,
    json: Path | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    node_rank: int | None = None,
    data: tuple[Path, ...] = (),
) -> int:
    """Check this machine for training, or several hosts for training together.

    Example: shoal doctor --json doctor.json

    Example: shoal doctor --nnodes 2 --rdzv 10.0.0.1:29400   (on both, within 30 s)

    Parameters
    ----------
    json
        JSON file to write the result to.
    nnodes
        Number of hosts to check together. Run the same command on each, in the folder where you will train.
    rdzv
        Rendezvous address as HOST:PORT: the name or IP address of the first host, and a free port on it.
    node_rank
        Number of this host, from 0 (default: 0 for the host that owns the address in --rdzv).
    data
        Dataset folders to check; with several hosts, also whether they are the same on all.
    """
    from shoal.doctor.command import doctor as run
    from shoal.runtime.network import several_hosts

    return run(json, several_hosts(nnodes, rdzv, node_rank), data)


checkpoint = App(
    name="checkpoint",
    group=_MODEL,
    group_commands=COMMANDS,
    help="List, verify, remove or gather checkpoints.",
)
app.command(checkpoint)


@checkpoint.command
def ls(path: Path, *, json: Path | None = None) -> int:
    """List checkpoints, newest first, after verifying every file.

    Example: shoal checkpoint ls runs/first

    Parameters
    ----------
    path
        Run folder, checkpoints folder, or one checkpoint.
    json
        JSON file to write the result to.
    """
    from shoal.cli.checkpoint import list_checkpoints

    return list_checkpoints(path, json)


@checkpoint.command
def verify(path: Path) -> int:
    """Verify every file of each checkpoint, and restore the names of intact ones named bad-step-*.

    Exit status: 0 all checkpoints named step-... are intact, 1 one is damaged, or there is none.

    Example: shoal checkpoint verify runs/first/checkpoints/step-00000600

    Parameters
    ----------
    path
        Run folder, checkpoints folder, or one checkpoint.
    """
    from shoal.cli.checkpoint import verify_checkpoints

    return verify_checkpoints(path)


@checkpoint.command
def rm(path: Path, *, force: bool = False) -> int:
    """Remove one checkpoint.

    Example: shoal checkpoint rm runs/first/checkpoints/step-00000600

    Parameters
    ----------
    path
        Checkpoint folder.
    force
        Remove the checkpoint even if it is the newest intact one.
    """
    from shoal.cli.checkpoint import remove_checkpoint

    return remove_checkpoint(path, force)


@checkpoint.command
def gather(path: Path, folders: tuple[Path, ...], /) -> int:
    """Complete a checkpoint whose parts are on several hosts without a shared folder.

    First copy the checkpoints of the other hosts to this host, each into its own folder.

    Example: shoal checkpoint gather runs/first copies/south copies/east

    Parameters
    ----------
    path
        This host's part, which will be completed: a checkpoint, or a run folder (its newest checkpoint).
    folders
        The other hosts' parts: run folders, checkpoints folders, or checkpoints.
    """
    from shoal.cli.checkpoint import gather_parts

    return gather_parts(path, folders)


dataset = App(name="dataset", group=_DATA, group_commands=COMMANDS, help="List, verify or show datasets.")
app.command(dataset)
app.command(explain, group=_DATA)


@dataset.command(name="ls")
def ls_datasets(path: Path = Path("datasets"), *, json: Path | None = None) -> int:
    """List datasets with their sizes, and check that their files are complete.

    Example: shoal dataset ls datasets

    Parameters
    ----------
    path
        Dataset, or folder of datasets.
    json
        JSON file to write the result to.
    """
    from shoal.data.commands import list_datasets

    return list_datasets(path, json)


@dataset.command(name="verify")
def verify_datasets(path: Path, *, json: Path | None = None) -> int:
    """Verify every file of a dataset against its digest.

    Exit status: 0 all files are intact, 1 a file is damaged.

    Example: shoal dataset verify datasets/mine

    Parameters
    ----------
    path
        Dataset, or folder of datasets.
    json
        JSON file to write the result to.
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
    """Show a dataset's splits, vocabulary, tokenizer and options, and the text and source of a document.

    Example: shoal dataset show datasets/mine --doc 0

    Parameters
    ----------
    path
        Dataset folder.
    doc
        Number of a document in the split, from 0 (default: the beginning of document 0).
    split
        Split of the document.
    json
        JSON file to write the result to.
    """
    from shoal.data.commands import show_dataset as run

    return run(path, doc, split, json)


app.command(bench)


@app.command(group=_DATA)
def quickstart(*, output: Path = Path("quickstart")) -> None:
    """Demonstrate Shoal offline in three minutes: prepare text, train a GPT, recover from a killed worker.

    Example: shoal quickstart --output /tmp/quickstart

    Parameters
    ----------
    output
        Folder for the dataset and the runs.
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
    if {*HELP_FLAGS, "completion"} & {*sys.argv}:  # cyclopts reads classes and their bases for each use
        import docstring_parser

        docstring_parser.parse_from_object = cache(docstring_parser.parse_from_object)
    try:
        status = app(result_action="return_value", print_error=False, exit_on_error=False)
    except CycloptsError as error:
        print(usage_error(error), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `shoal ... | head`
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    sys.exit(status if isinstance(status, int) else EXIT_DONE)
