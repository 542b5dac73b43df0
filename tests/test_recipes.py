"""docs/recipes.md: each recipe is run with small sizes, in order, in one folder; what it names exists."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from shoal.data.tokenizer import bytes_tokenizer_json
from tests import commands
from tests.interop.models import nanogpt_file, random_model
from tests.pages import shell_lines, wrong_commands, wrong_settings
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "recipes.md").read_text()
RECIPES = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE))
TWO = "Two machines"
LONG = (  # much the commands of other recipes and tests
    "How long it takes and whether it fits",
    "From nanoGPT",
    "From transformers' Trainer",
    "From torchtitan",
    "Fine-tune a Hugging Face model",
)
RUN = [pytest.param(name, marks=[pytest.mark.proof] * (name in LONG)) for name in RECIPES if name != TWO]
SMALL = {  # options in place of the page's, or beside them
    "train": {
        "--model.n_layers": "2",
        "--model.d_model": "48",
        "--model.n_heads": "4",
        "--model.d_ff": "0",
        "--model.max_seq_len": "32",
        "--train.seq_len": "16",
        "--train.steps": "4",
        "--train.global_batch_size": "8",
        "--train.micro_batch_size": "2",
        "--train.log_every": "1",
        "--eval.every": "2",
        "--eval.sequences": "4",
        "--schedule.warmup_steps": "1",
        "--runtime.device": "cpu",
        "--runtime.threads": "1",
        "--precision.dtype": "fp32",
    },
    "generate": {"--max-tokens": "4", "--device": "cpu"},
    "evaluate": {"--device": "cpu"},
    "import": {"--vocab-size": "257"},
    "export": {"--no-prove": None},
}
_LONG_NAMES = {
    "--steps": "--train.steps",
    "--batch-size": "--train.global_batch_size",
    "--lr": "--optimizer.lr",
}
SMALL["advise"] = SMALL["train"] | {"--train.micro_batch_size": "1", "--seconds": "1"}


def in_small(line):
    """Return the words of a command line after `shoal`, with small sizes; a trial stops after two steps."""
    words = [_LONG_NAMES.get(word, word) for word in shlex.split(line)[1:]]
    options = SMALL.get(words[0], {}) | ({"--stop-after": "2"} if "--stop-after" in words else {})
    for name, value in options.items():
        if name in words and value is not None:
            words[words.index(name) + 1] = value
        elif words[0] != "import":
            words += [name] if value is None else [name, value]
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, a folder of Hugging Face and a nanoGPT checkpoint; the tokenizer has an id for each byte."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("texts", "data/shakespeare", "models", "out"):
        (folder / name).mkdir(parents=True)
    for page in ("glossary", "checkpoints", "layouts"):
        (folder / "texts" / f"{page}.txt").write_text((DOCS / f"{page}.md").read_text())
    (folder / "data/shakespeare/input.txt").write_text((DOCS / "training.md").read_text())
    (folder / "corpus.jsonl").write_text('{"text": "to be, or not to be"}\n' * 200)
    theirs = random_model("gpt2", vocab_size=257)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = 256
    theirs.save_pretrained(folder / "models/gpt2")
    (folder / "models/gpt2/tokenizer.json").write_text(bytes_tokenizer_json())
    nanogpt_file(folder / "out/ckpt.pt")
    return folder


@pytest.mark.parametrize("name", RUN)
def test_a_recipe_runs(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    if not (folder / "datasets/mine").exists():
        assert commands.run("prepare", "texts", "--output", "datasets/mine").returncode == 0
    for line in shell_lines(RECIPES[name]):
        done = commands.run(*in_small(line))
        expected = 75 if "--stop-after" in line else 0
        assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.proof
def test_the_recipe_for_two_machines_runs_on_two_hosts(folder, monkeypatch, two_hosts):
    monkeypatch.chdir(folder)
    assert commands.run("prepare", "texts", "--output", "datasets/mine").returncode == 0
    for line in shell_lines(RECIPES[TWO]):
        words = [sys.executable, "-m", "shoal", *in_small(line.replace("10.0.0.1:29400", two_hosts.rdzv))]
        hosts = [two_hosts.start(host, words, folder) for host in ("north", "south")]
        screens = [host.communicate(timeout=120)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], f"{line}\n{screens}"


def test_the_plan_begins_with_what_the_page_shows():
    (line,) = (line for line in PAGE.splitlines() if line.startswith("shoal plan "))
    (shown,) = re.findall(r"(?ms)^```text\n(.*?)^```", PAGE)
    assert commands.run(*line.split()[1:]).stdout.startswith(shown)


def test_every_command_option_preset_and_setting_exists():
    assert wrong_commands(PAGE) == []
    assert wrong_settings(PAGE) == []


def test_the_list_at_the_top_has_every_recipe_and_no_other():
    listed = re.findall(r"(?m)^- \[(.*)\]\(#(.*)\)$", PAGE)
    assert [title for title, _ in listed] == list(RECIPES)
    assert [anchor for _, anchor in listed] == [
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in RECIPES
    ]
