from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from shoal.errors import DataError, InputError
from shoal.infer.load import load_text_model
from shoal.infer.sampling import Sampling
from shoal.infer.terminal import GenerateOptions, answer, answer_file, converse, read_prompts, run
from tests import commands

WISH = GenerateOptions(Sampling(temperature=0), max_tokens=5)
STRICT = replace(WISH, max_length_error=True)


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_text_model(trained_run, torch.device("cpu"))


@pytest.mark.parametrize("last", ["stop\n", " stop \n", ""])
def test_stop_alone_or_the_end_of_the_file_leaves_and_stopwatch_does_not(loaded, capsys, last):
    lines = iter(["stopwatch\n", "\n", "stop it\n", "don't stop\n", last, "never seen\n"][: 6 if last else 4])
    converse(loaded, lines, WISH, ask=False)
    said = capsys.readouterr().out
    assert all(text in said for text in ("stopwatch", "stop it", "don't stop"))
    assert "never seen" not in said
    assert list(lines) == (["never seen\n"] if last else [])


def test_a_conversation_asks_and_survives_a_prompt_that_is_too_long(loaded, capsys):
    converse(loaded, ["x" * 99 + "\n", "fish\n"], STRICT, ask=True)
    said = capsys.readouterr()
    assert said.out.count("> ") == 3
    assert "99 tokens" in said.err
    assert "fish" in said.out


def test_several_samples_are_numbered(loaded, capsys):
    answer(loaded, "fish", GenerateOptions(Sampling(), max_tokens=5, samples=3))
    said = capsys.readouterr().out
    assert [f"--- {n} of 3\nfish" in said for n in (1, 2, 3)] == [True] * 3


def test_control_characters_do_nothing_on_a_terminal(loaded, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    answer(loaded, "a\x1b[2Jb\tc\x07", WISH)
    assert capsys.readouterr().out.startswith("a\ufffd[2Jb\tc\ufffd")


def test_a_file_of_prompts_is_answered_line_by_line(loaded, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out" / "out.jsonl"
    source.write_text('{"prompt": "fish", "id": 7}\n\n{"prompt": "längere Frage"}\n')
    wish = GenerateOptions(Sampling(seed=1), max_tokens=6, samples=2, batch_size=3)
    answer_file(loaded, source, target, wish)
    first, second = map(json.loads, target.read_text().splitlines())
    assert (first["prompt"], first["id"], second["prompt"]) == ("fish", 7, "längere Frage")
    assert [len(record["completions"]) for record in (first, second)] == [2, 2]
    assert set(first["completions"][0]) == {"text", "num_tokens", "finish"}
    assert "2 prompts, 4 completions, 24 tokens" in capsys.readouterr().err
    answer_file(loaded, source, None, wish)
    assert capsys.readouterr().out == target.read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n\n["b"]\n', "line 3: not a JSON object"),
        ('{"text": "a", "id": 1}\n', "(?s)line 1: no text under the key \"prompt\".*its keys: 'text', 'id'"),
        ('{"prompt": 5}\n', "line 1: no text"),
        (b'{"prompt": "\xff"}\n', "line 1: not valid JSON"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, said):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said):
        read_prompts(path)


def test_a_prompt_that_does_not_fit_is_named_by_line_and_nothing_is_written(loaded, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "fish"}\n' + json.dumps({"prompt": "x" * 99}) + "\n")
    with pytest.raises(InputError, match=r"in.jsonl, line 2: a prompt of 99 tokens"):
        answer_file(loaded, source, target, STRICT)
    assert not target.exists()


def test_long_prompts_and_texts_slide_in_all_three_ways_to_ask(loaded, tmp_path, capsys):
    prompt, wish = "fish" * 30, replace(WISH, max_tokens=90)
    answer(loaded, prompt, wish)
    said = capsys.readouterr().out
    converse(loaded, [prompt], wish, ask=False)
    assert capsys.readouterr().out == said
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": prompt}) + "\n")
    answer_file(loaded, source, None, wish)
    (made,) = json.loads(capsys.readouterr().out)["completions"]
    assert (made["num_tokens"], prompt + made["text"] + "\n") == (90, said)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens 0 is not allowed"),
        ({"samples": 0}, "--samples 0"),
        ({"batch_size": -1}, "--batch-size -1"),
        (
            {"sampling": Sampling(temperature=0), "samples": 2},
            "--temperature 0 would give the same text 2 times",
        ),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wish, said):
    with pytest.raises(InputError, match=said):
        GenerateOptions(**{"sampling": Sampling()} | wish)


def test_arguments_that_exclude_each_other_are_refused(tmp_path):
    with pytest.raises(InputError, match="--prompt and --input"):
        run(tmp_path, "a", tmp_path / "in.jsonl", None, "cpu", 1, WISH)
    with pytest.raises(InputError, match="--output needs --input"):
        run(tmp_path, "a", None, tmp_path / "out.jsonl", "cpu", 1, WISH)


def generate(run_folder, *arguments):
    return commands.run("generate", run_folder, *arguments)


def test_the_command_line_converses_and_repeats_itself_for_a_seed(trained_run):
    command = [sys.executable, "-m", "shoal", "generate", trained_run, "--max-tokens", "8", "--seed", "5"]
    typed = {"input": "fish\nstop\n", "capture_output": True, "text": True}
    first = subprocess.run(command, timeout=60, check=True, **typed)
    assert first.stdout.startswith("fish")
    asked = generate(trained_run, "--max-tokens", "8", "--seed", "5", "--prompt", "fish")
    assert asked.stdout == first.stdout
    missing = generate(trained_run / "nowhere", "--prompt", "fish")
    assert missing.returncode == 2
    assert "is not a folder" in missing.stderr


@pytest.mark.proof
def test_a_model_cut_over_two_processes_writes_the_same_text(trained_run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fish"}\n{"prompt": ""}\n')
    wish = ["--input", str(prompts), "--max-tokens", "80"]  # 64 positions: both slide
    whole = generate(trained_run, *wish, "--greedy")
    cut = generate(trained_run, *wish, "--temperature", "0", "--tp", "2")
    assert (whole.returncode, cut.returncode) == (0, 0), cut.stderr
    assert cut.stdout == whole.stdout != ""
    assert [done.stderr.count("note: prompt and new tokens exceed") for done in (whole, cut)] == [1, 1]


def test_a_cut_that_does_not_divide_the_model_says_what_does(trained_run):
    refused = generate(trained_run, "--prompt", "fish", "--tp", "3")
    assert refused.returncode == 2
    assert "is not divisible by parallel.tp = 3" in refused.stderr
    assert "use parallel.tp = 1, 2" in refused.stderr


SAVES = """
import os
from shoal.infer import distributed
resolve = distributed.resolve_for

def resolve_and_save(path, tp):
    found = resolve(path, tp)
    os.rename(path / "next", path / "checkpoints/step-00000004")
    return found

distributed.resolve_for = resolve_and_save
"""


@pytest.mark.proof
def test_all_processes_load_one_checkpoint_while_a_run_saves_another(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    (run / "checkpoints/step-00000004").rename(run / "next")
    (tmp_path / "sitecustomize.py").write_text(SAVES)
    words = ("--prompt", "fish", "--max-tokens", "4", "--tp", "2")
    done = commands.run("generate", run, *words, env=commands.planted(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step-00000002: 64 positions" in done.stderr
    assert (run / "checkpoints/step-00000004").is_dir()
