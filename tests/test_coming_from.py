"""docs/coming-from.md: what it names exists, and each argument of the GPT-2 example has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.config import rules
from shoal.config.load import load_config
from tests.pages import rows, wrong_commands, wrong_settings

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
        "Try `shoal translate`.",
        "```sh\nshoal train gpt2 --train.stepz 3\n```",
        "Try `shoal train gpt3`.",
    ],
)
def test_a_command_that_does_not_exist_is_found(page):
    assert wrong_commands(page)
