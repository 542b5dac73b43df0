"""Hugging Face folders given to `train --init` and `export` as they are."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from shoal.cli.models import export
from shoal.config.load import load_config, validate
from shoal.data.tokenizer import bytes_tokenizer_json, load_tokenizer
from shoal.errors import ConfigError, InputError
from shoal.infer.serve.chat import Chat
from shoal.interop.hugging_face import with_model_of
from shoal.interop.importing import Wanted, as_checkpoint, run
from tests import commands
from tests.cases import every
from tests.models.hf import random_gpt2, random_llama
from tests.tiny_dataset import random_dataset, with_other_tokenizer
from tests.train.ranks import equal, run_training, tiny_config

ENDS = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
ONE_STEP = {"train": {"steps": 1}, "schedule": {"warmup_steps": 0}}


@pytest.fixture
def llama(tmp_path):
    """A folder of a tiny Llama with the tokenizer of the tests' datasets."""
    random_llama(**ENDS).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text(bytes_tokenizer_json())
    return tmp_path / "llama"


# --- the shape ---


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_folder_gives_what_the_configuration_leaves_out(tmp_path, kind):
    other = {"layer_norm_epsilon": 1e-6, "n_inner": 100} if kind == "gpt2" else {"rope_theta": 5e5}
    {"gpt2": random_gpt2, "llama": random_llama}[kind](**other).save_pretrained(tmp_path)
    model = with_model_of(validate({"model": {"n_layers": 3, "dropout": 0.1}}, "test"), tmp_path).model
    assert (model.style, model.n_layers, model.d_model, model.n_heads) == (kind, 3, 48, 4)
    assert (model.max_seq_len, model.norm_eps, model.vocab_size) == (32, 1e-6, 0)
    assert (model.d_ff, model.n_kv_heads, model.tie_embeddings, model.rope_theta) == (
        (100, 4, True, 10000.0) if kind == "gpt2" else (80, 2, False, 5e5)
    )
    assert model.dropout == 0.1


def test_a_shape_that_differs_is_refused_with_the_settings_to_give(llama):
    given = {"model": {"tie_embeddings": True, "rope_theta": 1e4, "n_kv_heads": 0}}
    with pytest.raises(
        ConfigError, match=r"has model.style = llama, not gpt2, .*n_layers = 3, not 4"
    ) as caught:
        with_model_of(load_config("tiny", given), llama)
    words = caught.value.hint.removeprefix("add --").split(" --")
    assert "model.tie_embeddings=false" in words
    assert "train.seq_len=32" in words
    for word in words:  # what was told to do leads to no other error
        name, value = word.split("=")
        section, field = name.split(".")
        given.setdefault(section, {})[field] = {"false": False}.get(value, value)
    config = with_model_of(load_config("tiny", given), llama)
    assert (config.model.n_layers, config.model.n_kv_heads, config.train.seq_len) == (3, 2, 32)


def test_another_folder_gives_no_shape(llama, tmp_path):
    run(llama, tmp_path / "ours", Wanted())
    config = load_config("tiny")
    assert with_model_of(config, tmp_path / "ours") is config
    assert with_model_of(config, tmp_path / "nowhere") is config


def test_a_configuration_that_is_no_object_is_a_sentence(llama):
    (llama / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config.json is not a JSON object"):
        with_model_of(load_config("tiny"), llama)


# --- train --init ---


def run_child(run_dir, values, parent):
    return run_training(run_dir, values, init=parent)


@pytest.mark.parametrize("layout", every(2, [{"tp": 2}, {}]))
def test_ranks_train_from_the_folder_as_from_its_import(pool, data, llama, tmp_path, layout):
    model = with_model_of(validate({}, "test"), llama).model.model_dump(exclude={"vocab_size"})
    values = tiny_config(data, **ONE_STEP, parallel=layout) | {"model": model}
    run(llama, tmp_path / "imported", Wanted())
    ours = pool.run(run_child, 2, tmp_path / "ours", values, tmp_path / "imported")[0]
    theirs = pool.run(run_child, 2, tmp_path / "theirs", values, llama)[0]
    equal(ours, theirs)
    [made] = (tmp_path / "theirs").glob("init-*")
    state = json.loads((tmp_path / "theirs/checkpoints/step-00000001/state.json").read_text())
    assert state["lineage"][0]["imported"]["format"] == "Hugging Face"
    assert state["lineage"][1]["checkpoint"] == str(made.resolve())


def test_a_folder_is_imported_again_only_when_its_files_have_changed(llama, tmp_path):
    first = as_checkpoint(llama, tmp_path / "run")
    before = (first / "manifest.json").stat().st_mtime_ns
    assert as_checkpoint(llama, tmp_path / "run") == first
    assert (first / "manifest.json").stat().st_mtime_ns == before
    os.utime(llama / "model.safetensors", ns=(1, 1))
    assert as_checkpoint(llama, tmp_path / "run") != first


def test_one_command_fine_tunes_a_folder_and_refuses_another_tokenizer(data, llama, tmp_path):
    arguments = ["train", "finetune", "--init", llama, "--data", data, "--run-dir", tmp_path / "run"]
    arguments += ["--train.steps", 1, "--train.seq_len", 16, "--precision.dtype", "fp32"]
    done = commands.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "llama: 3 layers x 48 wide" in done.stdout + done.stderr
    assert (tmp_path / "run/checkpoints/step-00000001").is_dir()
    arguments[5] = with_other_tokenizer(random_dataset(tmp_path / "data"))
    arguments[7] = tmp_path / "other"
    done = commands.run(*arguments)
    assert done.returncode == 2
    assert "is another tokenizer than" in done.stderr


def test_a_chat_template_goes_through_training_and_a_resume_into_the_export(pool, data, llama, tmp_path):
    template, end = "{% for one in messages %}<{{ one.content }}>{{ eos_token }}{% endfor %}", "<|endoftext|>"
    settings = {"chat_template": template, "eos_token": end, "auto_map": {"AutoTokenizer": "evil.py"}}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    model = with_model_of(validate({}, "test"), llama).model.model_dump(exclude={"vocab_size"})
    for steps in (1, 2):  # the second start resumes
        values = tiny_config(data, **ONE_STEP) | {"model": model}
        values["train"]["steps"] = steps
        pool.run(run_child, 1, tmp_path / "run", values, llama)
    export(tmp_path / "run/checkpoints/step-00000002", tmp_path / "out")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Why?"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == f"<Why?>{end}"
    assert "auto_map" not in (tmp_path / "out/tokenizer_config.json").read_text()
    chat = Chat(load_tokenizer(tmp_path / "out"), tmp_path / "run/checkpoints/step-00000002")
    assert chat.tokens(messages) == [*b"<Why?>", 256]


# --- export ---


def test_a_folder_is_exported_with_a_certificate(llama, tmp_path, capsys):
    export(llama, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["proven"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == bytes_tokenizer_json()
    assert f"{tmp_path / 'out'}: proven equal to {llama}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]


def test_an_export_that_fails_leaves_nothing(llama, tmp_path):
    (llama / "model.safetensors").unlink()
    with pytest.raises(InputError):
        export(llama, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
