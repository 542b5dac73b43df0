"""docs/coming-from.md: what it names exists, and each argument of the GPT-2 example has its row."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from cyclopts import App

from shoal.cli.app import app
from shoal.config import rules
from shoal.config.load import load_config, preset_names, validate
from shoal.config.sections import Config
from shoal.errors import ConfigError

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "coming-from.md").read_text()

# What get_args() of the GPT-2 example's arguments.py accepts, and what DeepSpeed adds to it.
ARGUMENTS = re.findall(
    r"\S+",
    """
pretrained-bert attention-dropout num-attention-heads hidden-size intermediate-size num-layers
layernorm-epsilon hidden-dropout max-position-embeddings vocab-size deep-init
make-vocab-size-divisible-by cpu-optimizer cpu_torch_adam fp16 fp32-embedding fp32-layernorm
fp32-tokentypes fp32-allreduce hysteresis loss-scale loss-scale-window min-scale batch-size
weight-decay checkpoint-activations checkpoint-num-layers deepspeed-activation-checkpointing clip-grad
train-iters log-interval exit-interval seed reset-position-ids reset-attention-mask lr-decay-iters
lr-decay-style lr warmup save save-interval no-save-optim no-save-rng load no-load-optim no-load-rng
finetune resume-dataloader distributed-backend local_rank eval-batch-size eval-iters eval-interval
eval-seq-length eval-max-preds-per-seq overlapping-eval cloze-eval eval-hf load-openai temperature
top_p top_k out-seq-length model-parallel-size shuffle train-data use-npy-data-loader train-data-path
val-data-path test-data-path input-data-sizes-file delim text-key eval-text-key valid-data test-data
split lazy-loader loose-json presplit-sentences num-workers tokenizer-model-type tokenizer-path
tokenizer-type cache-dir use-tfrecords seq-length max-preds-per-seq deepspeed deepspeed_config
deepscale deepscale_config deepspeed_mpi
""",
)
NO_SETTINGS = ("metrics.jsonl", "tokenizer.json")  # names of files


def rows(page):
    """Return (theirs, ours) of each row of each table."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in cells), [row for row in cells if len(row) != 2]
    return [(theirs, ours) for theirs, ours in cells if not set(theirs) <= {"-"}]


def shoal_spans(page):
    """Return what stands in code font about Shoal: outside of tables, and in their second column."""
    prose = "\n".join(line for line in re.sub(r"(?ms)^```.*?^```", "", page).splitlines() if line[:1] != "|")
    return [
        span for text in (prose, *(ours for _, ours in rows(page))) for span in re.findall("`([^`]+)`", text)
    ]


def shoal_commands(page):
    """Return every command line: in code font, and in shell blocks."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```", page)
    lines = [line for block in blocks for line in block.splitlines()]
    return lines + [span for span in shoal_spans(page) if span.startswith("shoal ")]


def options_of(command: App) -> set[str]:
    names = {name for argument in command.assemble_argument_collection() for name in argument.names}
    return names | {name.replace("_", "-") for name in names}


def wrong_commands(page):
    """Find commands, options and presets that do not exist."""
    wrong = []
    for line in shoal_commands(page):
        _, name, *words = shlex.split(line)
        if name not in app:
            wrong.append(line)
            continue
        command = app[name]
        while words and words[0] in command:
            command, words = command[words[0]], words[1:]
        given = [word for word in words if word.startswith("--")]
        wrong += [f"{line}: {option}" for option in given if option not in options_of(command)]
        if name == "train" and words and words[0][0] != "-" and not words[0].endswith(".toml"):
            wrong += [line] * (words[0] not in preset_names())
    return wrong


def wrong_settings(page):
    """Find settings that do not exist, or would not take the value that the page gives them."""
    wrong = []
    for span in shoal_spans(page):
        found = re.fullmatch(r"([a-z_]+)\.([a-z_0-9]+)( = .+)?", span)
        if not found or span in NO_SETTINGS:
            continue
        section, field, value = found.groups()
        fields = Config.model_fields
        if section not in fields or field not in fields[section].annotation.model_fields:
            wrong.append(span)
            continue
        try:
            validate({section: tomllib.loads(field + value) if value else {}}, span)
        except ConfigError:
            wrong.append(span)
    return wrong


def test_every_setting_exists_and_takes_its_value():
    assert wrong_settings(PAGE) == []


def test_every_command_option_and_preset_exists():
    assert wrong_commands(PAGE) == []


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_of_the_gpt2_example_has_one_row(argument):
    assert sum(f"`--{argument}`" in theirs for theirs, _ in rows(PAGE)) == 1


def test_no_row_names_an_argument_that_the_gpt2_example_did_not_have():
    named = re.findall(r"`--([\w-]+)`", "".join(theirs for theirs, _ in rows(PAGE)))
    assert sorted(named) == sorted(ARGUMENTS)


def test_each_row_says_what_to_do_instead_or_why_not():
    empty = [ours for _, ours in rows(PAGE) if len(ours) < 7]
    assert empty == []


def test_the_preset_of_the_example_trains_on_its_eight_gpus():
    rules.check(load_config("megatron-345m", {}), dp=8)


@pytest.mark.parametrize(
    "page",
    ["Use `train.recomputed`.", "| a | `optimiser.lr` |", '| a | `train.recompute = "no"` |'],
)
def test_a_setting_that_does_not_exist_is_found(page):
    assert wrong_settings(page)


@pytest.mark.parametrize(
    "page",
    [
        "| a | `shoal prepare --text-keys` |",
        "Try `shoal explain`.",
        "```sh\nshoal train gpt2 --train.stepz 3\n```",
        "Try `shoal train gpt3`.",
    ],
)
def test_a_command_that_does_not_exist_is_found(page):
    assert wrong_commands(page)
