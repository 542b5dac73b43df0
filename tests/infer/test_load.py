from __future__ import annotations

import shutil

import pytest
import torch

from shoal.data.tokenizer import parse_tokenizer
from shoal.errors import CheckpointError, InputError
from shoal.infer.load import load_text_model, resolve_for

CPU = torch.device("cpu")


def test_a_run_folder_gives_its_newest_checkpoint_with_all_that_belongs_to_it(trained_run):
    loaded = load_text_model(trained_run, CPU)
    assert loaded.checkpoint == trained_run / "checkpoints" / "step-00000004"
    assert (loaded.model.shape.vocab_size, loaded.model.shape.padded_vocab_size) == (257, 384)
    assert loaded.eod_id == 256
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Åb")) == "Åb"
    assert not loaded.model.training
    assert loaded.model.head.weight is loaded.model.embed.weight


def test_one_checkpoint_can_be_named(trained_run):
    older = load_text_model(trained_run / "checkpoints" / "step-00000002", CPU).model
    newer = load_text_model(trained_run, CPU).model
    assert not torch.equal(older.norm.weight, newer.norm.weight)
    tokens = torch.arange(10)[None]
    assert not torch.equal(older(tokens), newer(tokens))


def test_a_damaged_newest_checkpoint_is_passed_over(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shard = next((run / "checkpoints" / "step-00000004" / "model").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert load_text_model(run, CPU).checkpoint.name == "step-00000002"
    with pytest.raises(CheckpointError, match="step-00000004 is damaged"):
        load_text_model(run / "checkpoints" / "step-00000004", CPU)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a folder"):
        load_text_model(tmp_path / "nowhere", CPU)
    with pytest.raises(CheckpointError, match="holds no good checkpoint"):
        load_text_model(tmp_path, CPU)


def test_a_tokenizer_larger_than_the_model_is_refused(trained_run, monkeypatch):
    larger = parse_tokenizer(
        (trained_run / "checkpoints/step-00000004/tokenizer.json").read_bytes(), "larger"
    )
    larger.vocab_size = 300
    monkeypatch.setattr("shoal.infer.load.load_tokenizer", lambda folder: larger)
    with pytest.raises(CheckpointError, match="has 300 ids, its model 257"):
        load_text_model(trained_run, CPU)


def test_a_hugging_face_folder_is_not_cut(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert resolve_for(tmp_path, 1) == tmp_path
    with pytest.raises(InputError, match=r"(?s)is a Hugging Face folder, which tensor.*shoal import"):
        resolve_for(tmp_path, 2)
