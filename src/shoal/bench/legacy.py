"""dlbench's `.config` files, read as cells of `shoal bench networks`.

A file has lines `key: value`, a block in braces with an experiment a line, and comments after #:

    tools: caffe,torch
    experiments: #<type>; <network>; <device id>; <device count>; <batch size>; <epochs>; <epoch size>; <rate>
    {
        fc; fcn5; -1; 4; 1024; 2; 60000; 0.05
    }

A device id of -1 is the CPU, and the count then that of its threads, unless `cpu_count` says it. Other ids
are GPUs, and the batch size is that of one of them. As in dlbench, a line with the word None is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from shoal.bench.environments import FRAMEWORKS
from shoal.bench.networks import Cell, NetworksOptions
from shoal.config.load import read_toml
from shoal.errors import InputError, counted, nearest
from shoal.runtime.cores import physical_cores

_TOOLS = {"caffe": "caffe", "cntk": "cntk", "mxnet": "mxnet", "tensorflow": "tensorflow", "torch": "pytorch"}
# By type and name. Only FCN-S has a name of its own; the others are those of real data.
_NETWORKS = {
    "fc; fcn5": "fcn-r",
    "fc; ffn26752": "fcn-s",
    "cnn; alexnet": "alexnet-r",
    "cnn; resnet": "resnet-56",
    "rnn; lstm": "lstm",
    "rnn; lstm32": "lstm",
}
_DESCRIBING = ("flag", "cpu_name", "gpu_name", "device_name", "cuda", "cudnn", "cuda_driver")
_KEYS = ("tools", "experiments", "host_file", "cpu_count", *_DESCRIBING)
_FIELDS = "type; network; device id; device count; batch size; epochs; epoch size; learning rate"


@dataclass(frozen=True)
class Experiment:
    """A row of the block."""

    network: str  # Shoal's name
    gpus: int  # 0: the CPU
    threads: int  # of the CPU; 0 with GPUs
    batch: int  # for each device


@dataclass(frozen=True)
class LegacyConfig:
    """What a file asks for, in Shoal's names."""

    frameworks: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    keys: tuple[str, ...]  # all that have a value


def configured(options: NetworksOptions, path: Path) -> NetworksOptions:
    """Return options that measure what a file asks for; print what is ignored, and why."""
    plain = NetworksOptions(())
    for name in ("networks", "frameworks", "batch_sizes", "threads"):
        if getattr(options, name) != getattr(plain, name):
            word = "NETWORK" if name == "networks" else f"--{name.replace('_', '-')}"
            hint = "leave one of them out: the file names networks, tools, batch sizes and threads"
            raise InputError(f"--config and {word} are given", hint=hint)
    config = parse(read_toml(path), str(path))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for sentence in ignored(config):
        console.print(f"{path}: {sentence}")
    return replace(options, cells=cells(config, options.modes))


def cells(config: LegacyConfig, modes: Sequence[str]) -> tuple[Cell, ...]:
    """Return the cells of all experiments, and those of PyTorch, which the others are compared with."""
    frameworks = dict.fromkeys(("pytorch", *(name for name in config.frameworks if name in FRAMEWORKS)))
    found: dict[tuple[str, int], dict[Cell, None]] = {}
    for one in config.experiments:
        group = found.setdefault((one.network, one.batch), {})
        for framework in frameworks:
            for mode in modes:
                threads = one.threads or physical_cores()
                group[Cell(one.network, framework, mode, one.batch, threads)] = None
    return tuple(cell for group in found.values() for cell in group)


def ignored(config: LegacyConfig) -> Iterator[str]:
    """Yield a sentence for each thing that is read otherwise than dlbench did, or not at all."""
    yield "epochs, epoch sizes and learning rates are ignored: see --steps; all rows have one learning rate"
    if gpus := [one.gpus for one in config.experiments if one.gpus]:
        yield f"GPUs of {counted(len(gpus), 'experiment')} are ignored: all are measured on the CPU"
        if max(gpus) > 1:
            yield "the number of GPUs is ignored: one process is measured, with the batch of one GPU"
    if "host_file" in config.keys:
        yield "host_file is ignored: one machine is measured"
    if described := [key for key in _DESCRIBING if key in config.keys]:
        yield f"{', '.join(described)}: ignored, the record describes this machine and its versions"
    for name in (name for name in config.frameworks if name not in FRAMEWORKS):
        yield f"{name} is left out: Shoal does not run it"
    if "pytorch" not in config.frameworks:
        yield "pytorch is added: the others are compared with it"


def parse(text: str, source: str) -> LegacyConfig:
    """Read the text of a file; `source` names it in errors."""
    values: dict[str, tuple[str, int]] = {}
    rows: list[tuple[str, int]] = []
    opened = 0  # line of the brace
    for number, line in enumerate(text.splitlines(), 1):
        line = "".join(line.partition("#")[0].split())
        key, colon, value = line.partition(":")
        if not line or "None" in line:
            continue
        if opened and line == "}":
            opened = 0
        elif opened:
            rows.append((line, number))
        elif line == "{":
            opened = number
        elif not colon:
            _fail(source, number, f"{line!r} is neither a setting nor in the block", "write key: value")
        elif key not in _KEYS:
            _fail(source, number, f"unknown key {key!r}", nearest(key, _KEYS))
        elif value:
            values[key] = (value, number)
    if opened:
        _fail(source, opened, "the block does not end", "end it with } on a line of its own")
    if "tools" not in values or not rows:
        missing = "tools" if "tools" not in values else "experiments"
        raise InputError(f"{source} has no {missing}", hint=f"write tools: NAMES and {{ rows of {_FIELDS} }}")
    names, at = values["tools"]
    tools = tuple(_one_of(name, _TOOLS, source, at, "tool") for name in names.split(","))
    count = values.get("cpu_count")
    threads = int(_number(int, *count, source, "cpu_count")) if count else 0
    return LegacyConfig(tools, tuple(_experiment(*row, source, threads) for row in rows), tuple(values))


def _experiment(row: str, line: int, source: str, cpu_count: int) -> Experiment:
    fields = row.removesuffix(";").split(";")
    if len(fields) != 8:
        _fail(source, line, counted(len(fields), "field"), f"write 8, with ; between them: {_FIELDS}")
    network = _one_of("; ".join(fields[:2]), _NETWORKS, source, line, "network")

    def number(what: str, place: int, least: int = 1, kind: Callable[[str], float] = int) -> int:
        return int(_number(kind, fields[place], line, source, what, least))

    count, batch = number("device count", 3), number("batch size", 4)
    number("epochs", 5)
    number("epoch size", 6, -1)
    number("learning rate", 7, 0, float)
    if fields[2] == "-1":
        return Experiment(network, 0, cpu_count or count, batch)
    for word in fields[2].split(","):
        _number(int, word, line, source, "device id", 0)
    return Experiment(network, count, 0, batch)


def _number(
    kind: Callable[[str], float], word: str, line: int, source: str, what: str, least: int = 1
) -> float:
    try:
        value = kind(word)
        if not least <= value < 1 << 31:
            raise ValueError
    except ValueError:
        _fail(source, line, f"{what} {word!r}", f"give a number of at least {least}")
    return value


def _one_of(word: str, allowed: dict[str, str], source: str, line: int, what: str) -> str:
    if word not in allowed:
        _fail(source, line, f"unknown {what} {word!r}", f"allowed: {', '.join(allowed)}")
    return allowed[word]


def _fail(source: str, line: int, what: str, hint: str) -> NoReturn:
    raise InputError(f"{source}, line {line}: {what}", hint=hint)
