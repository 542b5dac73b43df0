"""What `import shoal` offers, and examples/notebook.ipynb, whose cells are run in order."""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shoal
from shoal import notebook
from shoal.config.load import config_from_toml, load_config
from shoal.data.tokenizer import bytes_tokenizer_json, parse_tokenizer
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.infer.load import TextModel
from shoal.interop.hugging_face import with_model_of
from tests.models.hf import decoder_from_hf, random_gpt2

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "notebook.ipynb"
NAMES = ["ShoalError", "load", "prepare", "read_metrics", "train"]


def test_import_shoal_is_light_and_lists_its_names():
    script = (
        "import sys, shoal; heavy = {'torch', 'numpy', 'pydantic', 'shoal.notebook'} & set(sys.modules)\n"
    )
    script += "print(heavy, dir(shoal))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"set() {NAMES}"
    with pytest.raises(AttributeError, match="'shoal' has no attribute 'trian'"):
        shoal.trian  # noqa: B018


def test_train_is_a_function_and_the_package_of_its_name():
    import shoal.train.schedule as module

    assert shoal.train.schedule is module
    assert "run_dir" in inspect.signature(shoal.train.__call__).parameters
    for name in NAMES[1:]:
        offered = shoal.train.__call__ if name == "train" else getattr(shoal, name)
        assert offered is getattr(notebook, name)
        assert "Example: " in inspect.getdoc(offered)


def cells():
    found = json.loads(EXAMPLE.read_text())
    assert (found["nbformat"], found["cells"][1]["metadata"]) == (4, {"tags": ["parameters"]})
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


@pytest.mark.proof
def test_the_example_runs(tmp_path):
    (tmp_path / "text.txt").write_text("def main():\n    return 'fish'\n\n" * 400)
    parameters, *rest = cells()
    small = "TEXT, VOCAB_SIZE, STEPS = 'text.txt', 280, 4"
    script = "\n".join(
        [parameters, small, *rest, "print('end', len(metrics), len(points), type(model.model).__name__)"]
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, last = done.stdout.splitlines()
    assert any("step" in line for line in printed)  # what the commands print is passed on
    end, num_records, num_validations, kind = last.split()
    assert (end, kind) == ("end", "Decoder")
    assert int(num_records) >= 4
    assert int(num_validations) >= 1


@pytest.fixture
def ran(monkeypatch):
    """Note the command of a call, and the configuration that it is given."""
    found = []

    def run(words):
        config = config_from_toml(Path(words[1]).read_text(), "file") if words[0] == "train" else None
        found.append((list(map(str, words if config is None else words[:1] + words[2:])), config))

    monkeypatch.setattr(notebook, "_run", run)
    return found


def test_settings_may_be_nested_or_named_with_dots_and_a_config_may_be_an_object(ran, tmp_path):
    run_dir = tmp_path / "run"
    config = load_config("tiny")
    for source in ("tiny", config):
        given = {"train": {"steps": 7}, "optimizer.lr": 0.5}
        assert shoal.train(source, data="sets/a", run_dir=run_dir, nproc=2, init="old", **given) == run_dir
    assert [words for words, _ in ran] == [
        ["train", "--run-dir", str(run_dir), "--nproc", "2", "--init", "old"]
    ] * 2
    expected = {
        "train": {"steps": 7},
        "optimizer": {"lr": 0.5},
        "data": {"datasets": [str(Path.cwd() / "sets/a")]},
    }
    assert [config for _, config in ran] == [load_config("tiny", expected)] * 2
    with pytest.raises(ConfigError, match=r"(?s)steps=3 is not a section.*train=\{"):
        shoal.train("tiny", run_dir=run_dir, steps=3)
    with pytest.raises(ConfigError, match=r"(?s)unknown key train.stesp.*'steps'"):
        shoal.train("tiny", run_dir=run_dir, train={"stesp": 3})
    assert len(ran) == 2


def test_what_is_not_given_is_left_to_the_folder_that_training_starts_from(ran, tmp_path):
    random_gpt2().save_pretrained(tmp_path)
    for source in ("finetune", load_config("finetune")):
        shoal.train(source, run_dir=tmp_path / "run", init=tmp_path)
    for _, config in ran:
        assert config == load_config("finetune")
        assert with_model_of(config, tmp_path).model.d_model == random_gpt2().config.n_embd


def test_options_of_prepare_have_the_names_of_the_command_line(ran, tmp_path):
    given = {"vocab_size": 300, "validation": ("c", "d"), "limit": None}
    made = shoal.prepare(["a.txt", Path("b")], tmp_path / "set", **given)
    assert made == tmp_path / "set"
    options = ["--output", str(made), "--vocab-size", "300", "--validation", "c", "d"]
    assert ran == [(["prepare", "a.txt", "b", *options], None)]


def test_a_command_that_fails_is_an_error_with_its_own_words(tmp_path, capfd):
    with pytest.raises(ShoalError, match=r"(?s)^`shoal prepare` ended with status 2: .*nowhere.txt"):
        shoal.prepare(tmp_path / "nowhere.txt", tmp_path / "set")
    assert "error: " in capfd.readouterr().out
    with ThreadPoolExecutor(1) as thread, pytest.raises(ShoalError, match="ended with status 2"):
        thread.submit(shoal.prepare, tmp_path / "nowhere.txt", tmp_path / "set").result()
    with pytest.raises(InputError, match=r"(?s)metrics.jsonl does not exist.*folder of a run"):
        shoal.read_metrics(tmp_path)


COMMAND = """#!{python}
import os, signal, sys, time
def save(*_):
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # at once
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGINT, save)
print("begun", flush=True)
time.sleep(60)
"""
PARENT = """
import signal, sys
from shoal import notebook
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable = sys.argv[1]
notebook._run(["train"])
"""


@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupt_lets_the_command_save(tmp_path, alone):
    command = tmp_path / "command"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o700)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", PARENT, command], **pipes) as parent:
        assert parent.stdout.readline() == b"begun\n"
        sent = 0
        if not alone:
            os.killpg(parent.pid, signal.SIGINT)
        while not select.select([parent.stdout], [], [], 0.5 if alone else 60)[0] and sent < 60:
            sent += 1
            parent.send_signal(signal.SIGINT)
        out, errors = parent.communicate(timeout=60)
    assert out == b"saving\nsaved\n"
    assert errors.splitlines()[-1] == b"KeyboardInterrupt"
    assert sent >= 2 * alone  # by a front end that does not signal the kernel's children


def test_a_loaded_model_generates_and_scores(tmp_path):
    model = decoder_from_hf(random_gpt2(vocab_size=257, n_positions=16))
    tokenizer = parse_tokenizer(bytes_tokenizer_json().encode(), "bytes")
    loaded = notebook.LoadedModel(TextModel(model, tokenizer, 256, tmp_path))
    assert (loaded.model, loaded.tokenizer) == (model, tokenizer)
    tokens = [*b"fish"]
    for _ in range(12):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    assert loaded.generate("fish", max_tokens=12, temperature=0) == tokenizer.decode(tokens[4:]).rstrip(
        "\ufffd"
    )
    drawn = {loaded.generate(max_tokens=30, temperature=3.0, seed=seed) for seed in (1, 1, 2)}
    assert len(drawn) == 2
    logits = model(torch.tensor([[256, *b"fis"]]))[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([*b"fish"])).item()
    assert loaded.loss("fish") == pytest.approx(expected, rel=1e-5)
