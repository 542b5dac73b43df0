"""Checkpoints of other programs come in and go out with the same function, bit for bit where that can be."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from shoal.checkpoint.manifest import WEIGHTS, file_entry, read_manifest, read_state, verify
from shoal.config.layout import parse_layout
from shoal.errors import CheckpointError, InputError
from shoal.infer.load import load_decoder
from shoal.interop import export as export_module
from shoal.interop import importing, pickles
from shoal.interop.export import export
from shoal.interop.foreign import Told
from shoal.interop.importing import Wanted, run
from shoal.interop.pickles import read_pickle
from tests.cases import every
from tests.interop.models import MODELS, nanogpt_file, random_model
from tests.shared import SHARED
from tests.tiny_dataset import random_dataset, write_dataset
from tests.train.layouts import values_of
from tests.train.ranks import make_job, run_training, tiny_config

CPU = torch.device("cpu")


@torch.inference_mode()
def logits_of(model, tokens):
    got = model(tokens)
    return got if isinstance(got, torch.Tensor) else got.logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_comes_in_and_goes_out_as_it_was(tmp_path, name):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    assert verify(tmp_path / "ours") == []
    decoder, eod_id = load_decoder(tmp_path / "ours", CPU)
    assert eod_id == 0
    vocab_size = decoder.shape.vocab_size
    tokens = torch.randint(0, vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = logits_of(theirs, tokens)
    assert expected.abs().max() < 20
    scale = max(1.0, expected.abs().max().item())
    assert (logits_of(decoder, tokens)[..., :vocab_size] - expected).abs().max() < 5e-6 * scale

    export(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs)
    assert torch.equal(logits_of(again, tokens), expected)


def test_a_checkpoint_goes_out_and_comes_in_bit_for_bit_with_its_tokenizer(pool, tmp_path):
    data = random_dataset(tmp_path / "data")
    values = values_of(data, parse_layout("1"), "llama", checkpoint={"every": 5})
    pool.run(run_training, 1, tmp_path / "run", values)
    checkpoint = export(tmp_path / "run", tmp_path / "out")
    run(tmp_path / "out", tmp_path / "in", Wanted())
    (ours, eod_id), (back, eod_back) = (load_decoder(p, CPU) for p in (checkpoint, tmp_path / "in"))
    assert eod_id == eod_back == 256
    assert ours.shape == back.shape
    for (name, weight), other in zip(ours.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert (tmp_path / "in/tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("fish \u00e9")["input_ids"] == list("fish \u00e9".encode())
    assert tokenizer.decode(list(b"it 's , fish .")) == "it 's , fish ."
    assert tokenizer.eos_token_id == 256


@pytest.mark.parametrize("model", every(2, ["llama", "gpt2"]))
def test_every_layout_of_one_checkpoint_exports_the_very_same_bytes(pool, tmp_path, model):
    data = random_dataset(tmp_path / "data")
    first = values_of(data, parse_layout("1"), model, checkpoint={"every": 5})
    pool.run(run_training, 1, tmp_path / "one", first)
    export(tmp_path / "one", tmp_path / "out-one")
    for words in ("tp2", "pp2", "zero3x2"):
        values = values_of(data, parse_layout(words), model, checkpoint={"every": 5})
        # Resumed at its end, and one step more without a rate: the same weights, saved under another layout.
        pool.run(resave, 2, tmp_path / words, values, tmp_path / "one")
        export(tmp_path / words, tmp_path / f"out-{words}")
        names = sorted(file.name for file in (tmp_path / "out-one").iterdir())
        assert sorted(file.name for file in (tmp_path / f"out-{words}").iterdir()) == names
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            same = (tmp_path / "out-one" / name).read_bytes()
            assert (tmp_path / f"out-{words}" / name).read_bytes() == same, (words, name)


def resave(run_dir, values, source):
    """Save what `source` holds under the layout of `values`."""
    from shoal.train.saving import resume, save

    job = make_job(run_dir, values, init=source)
    resume(job)
    save(job, 1)
    job.checkpoints.wait()


def test_an_export_is_cut_into_files_that_transformers_puts_together(tmp_path):
    random_model("llama-grouped").save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    export(tmp_path / "ours", tmp_path / "out", shard_bytes=50_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in random_model("llama-grouped").state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    run(tmp_path / "out", tmp_path / "in", Wanted())
    assert load_decoder(tmp_path / "in", CPU)[0].shape.n_kv_heads == 2


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_file_comes_in_with_its_moments(tmp_path, bias):
    theirs, order = nanogpt_file(tmp_path / "ckpt.pt", bias=bias)
    run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())
    decoder, eod_id = load_decoder(tmp_path / "ours", CPU)
    assert eod_id == 300
    tokens = torch.randint(0, 301, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = logits_of(theirs, tokens)
    assert (logits_of(decoder, tokens)[..., :301] - expected).abs().max() < 5e-6 * expected.abs().max()
    moments = {}
    for file in (tmp_path / "ours/optimizer").iterdir():
        moments |= load_file(file)
    assert moments["positions.weight.step"] == 7
    number = order.index("transformer.h.1.attn.c_attn.weight")
    assert (moments["blocks.1.attention.k.weight.exp_avg"] == number + 1).all()
    assert moments["embed.weight.exp_avg_sq"].shape == (384, 48)
    assert not moments["embed.weight.exp_avg_sq"][301:].any()


def test_nanogpts_file_needs_only_the_model_and_its_arguments(tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt")
    held = torch.load(tmp_path / "ckpt.pt")
    torch.save({name: held[name] for name in ("model", "model_args")}, tmp_path / "least.pt")
    run(tmp_path / "least.pt", tmp_path / "ours", Wanted())
    assert not (tmp_path / "ours/optimizer").exists()


def test_the_steps_of_a_fused_adam_are_those_of_its_group(tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt")
    held = torch.load(tmp_path / "ckpt.pt")
    for state in held["optimizer"]["state"].values():
        del state["step"]
    held["optimizer"]["param_groups"][0]["step"] = 9
    torch.save(held, tmp_path / "fused.pt")
    run(tmp_path / "fused.pt", tmp_path / "ours", Wanted())
    moments = {}
    for file in (tmp_path / "ours/optimizer").iterdir():
        moments |= load_file(file)
    assert moments["positions.weight.step"] == 9


needs_megatron = pytest.mark.skipif(
    not (SHARED / "data/megatron").is_dir(), reason="../shared/data/megatron is not there"
)


@pytest.fixture(params=["v1100_tp1", "v1100_tp2"])
def megatron(request):
    return SHARED / "data/megatron" / request.param


def import_megatron(folder, target):
    run(folder / "checkpoint", target, Wanted(Told(n_heads=4, vocab_size=1100)))
    return load_decoder(target, CPU)[0]


@needs_megatron
def test_megatrons_files_give_its_logits_losses_and_text(megatron, tmp_path):
    decoder = import_megatron(megatron, tmp_path / "ours")
    expected = np.load(megatron / "expected.npz")
    tokens, labels = (torch.from_numpy(expected[key]).long() for key in ("input_ids", "labels"))
    logits = logits_of(decoder, tokens)[..., :1100]
    assert np.abs(logits.numpy() - expected["logits"][..., :1100]).max() < 5e-6
    losses = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="none")
    assert np.abs(losses.view(labels.shape).numpy() - expected["lm_loss_true_vocab"]).max() < 1e-5
    text = tokens
    with torch.inference_mode():
        for _ in range(expected["greedy"].shape[1]):
            text = torch.cat((text, decoder(text)[:, -1:].argmax(dim=-1)), dim=1)
    assert (text[:, tokens.shape[1] :].numpy() == expected["greedy"]).all()


def train_on(run_dir, values, source, batches, rates):
    """Go on as Megatron did: its batches, its rates, a target after a document's end not counted."""
    from shoal.train.optimiser import clip_gradients
    from shoal.train.saving import resume

    job = make_job(run_dir, values, init=source, init_optimizer=True)
    resume(job)
    (decoder,) = job.model.decoders
    found = []
    for tokens, rate in zip(torch.from_numpy(batches).long(), rates, strict=True):
        job.model.forget_gradients()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        losses = F.cross_entropy(decoder(inputs).flatten(0, 1), labels.flatten(), reduction="none")
        mask = (inputs != 1099).flatten()
        loss = (losses * mask).sum() / mask.sum()
        loss.backward()
        norm = math.sqrt(job.model.gradient_norm.squares())
        clip_gradients(job.model, norm, 1.0)
        job.optimiser.step(rate)
        found.append((loss.item(), norm))
    return found


@needs_megatron
def test_training_goes_on_from_megatrons_files_as_megatron_did(pool, megatron, tmp_path):
    import_megatron(megatron, tmp_path / "ours")
    told = json.loads((megatron / "resume.json").read_text())["continued_true_vocab"]
    batches = np.load(megatron / "train_tokens.npz")["tokens"][10:20]
    data = write_dataset(tmp_path / "data", {"train": [np.arange(1000)] * 3}, 1100, 1099)
    model = {"n_layers": 3, "d_model": 64, "n_heads": 4, "max_seq_len": 64, "vocab_size": 1100}
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "clip": 1.0}
    values = tiny_config(data, model=model, optimizer=adam)
    rates = [line["lr"] for line in told]
    (found,) = pool.run(train_on, 1, tmp_path / "run", values, tmp_path / "ours", batches, rates)
    expected = [(line["lm_loss"], line["grad_norm"]) for line in told]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@needs_megatron
def test_what_megatrons_files_do_not_say_is_asked_for(megatron, tmp_path):
    with pytest.raises(InputError, match="does not say how many heads") as caught:
        run(megatron / "checkpoint", tmp_path / "ours", Wanted())
    assert "--n-heads N --vocab-size N" in caught.value.hint
    with pytest.raises(InputError, match="5000 is more than the"):
        run(megatron / "checkpoint", tmp_path / "ours", Wanted(Told(n_heads=4, vocab_size=5000)))
    assert not (tmp_path / "ours").exists()


def test_a_later_megatron_is_refused(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {}, "checkpoint_version": 3.0}, tmp_path / "mp_rank_00/model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="a later Megatron-LM, with another order of query, key"):
        run(tmp_path, tmp_path / "ours", Wanted(Told(n_heads=4, vocab_size=1100)))


@needs_megatron
def test_what_was_trained_in_fp16_comes_in_with_its_fp32_weights(tmp_path):
    folder = SHARED / "data/megatron/v1100_tp1"
    content = read_pickle(folder / "checkpoint/iter_0000010/mp_rank_00/model_optim_rng.pt")
    names = sorted(content["model"], key=lambda name: content["model"][name].ndim != 2)
    groups = [
        [content["model"][n].clone() for n in names if (content["model"][n].ndim == 2) == two]
        for two in (1, 0)
    ]
    half = {
        "iteration": 10,
        "model": {name: tensor.half() for name, tensor in content["model"].items()},
        "optimizer": {"optimizer_state_dict": content["optimizer"], "fp32_from_fp16": groups},
    }
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(half, tmp_path / "mp_rank_00/model_optim_rng.pt")
    run(tmp_path, tmp_path / "ours", Wanted(Told(n_heads=4, vocab_size=1100)))
    expected = np.load(folder / "expected.npz")
    logits = logits_of(
        load_decoder(tmp_path / "ours", CPU)[0], torch.from_numpy(expected["input_ids"]).long()
    )
    assert np.abs(logits[..., :1100].numpy() - expected["logits"][..., :1100]).max() < 5e-6
    assert (tmp_path / "ours/optimizer").is_dir()


def resumed_moments(run_dir, values, source):
    """Begin from a checkpoint with its optimiser; return the steps that each weight's has taken."""
    from shoal.train.saving import resume

    job = make_job(run_dir, values, init=source, init_optimizer=True)
    resume(job)
    return {name: float(job.optimiser.state_of(w)["step"]) for name, w in job.model.named_weights().items()}


@pytest.mark.parametrize("bias", [True, False])
def test_training_goes_on_with_nanogpts_moments(pool, tmp_path, bias):
    nanogpt_file(tmp_path / "ckpt.pt", bias=bias)
    run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())
    data = write_dataset(tmp_path / "data", {"train": [np.arange(300)] * 3}, 301, 300)
    model = {"n_layers": 2, "d_model": 48, "n_heads": 4, "max_seq_len": 32}
    (steps,) = pool.run(
        resumed_moments, 1, tmp_path / "run", tiny_config(data, model=model), tmp_path / "ours"
    )
    assert set(steps.values()) == {7.0}


def test_the_padding_of_nanogpts_vocabulary_can_be_dropped(tmp_path):
    theirs, _ = nanogpt_file(tmp_path / "ckpt.pt")
    run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted(Told(vocab_size=290)))
    decoder, eod_id = load_decoder(tmp_path / "ours", CPU)
    assert (decoder.shape.vocab_size, eod_id) == (290, 289)
    tokens = torch.randint(0, 290, (2, 20), generator=torch.Generator().manual_seed(1))
    got, expected = logits_of(decoder, tokens)[..., :290], logits_of(theirs, tokens)[..., :290]
    assert (got - expected).abs().max() < 5e-6 * expected.abs().max()


def test_a_tokenizer_of_another_kind_goes_out_with_its_ids(tmp_path):
    from tokenizers import Tokenizer, models, trainers

    built = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["</s>", "<unk>"], unk_token="<unk>")
    built.train_from_iterator(["one fish two fish red fish blue fish"] * 9, trainer)
    built.save(str(tmp_path / "tokenizer.json"))
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "ours", Wanted(tokenizer=tmp_path / "tokenizer.json", eod_id=300))
    export(tmp_path / "ours", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("red fish")["input_ids"] == built.encode("red fish").ids
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == 300


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/shoal-was-here",)


@pytest.mark.parametrize("kind", ["zip", "zip of protocol 4", "plain", "plain of protocol 2"])
def test_a_hostile_pickle_is_refused_by_the_name_of_what_it_asked_for(tmp_path, kind):
    content, file = {"model": {"a": 1.0}, "model_args": Hostile()}, tmp_path / "ckpt.pt"
    if kind.startswith("zip"):
        torch.save(content, file, pickle_protocol=4 if kind.endswith("4") else 2)
    else:
        file.write_bytes(pickle.dumps(content, protocol=2 if kind.endswith("2") else 4))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.system, which"):
        run(file, tmp_path / "ours", Wanted())
    assert not os.path.exists("/tmp/shoal-was-here")
    assert not (tmp_path / "ours").exists()


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt")
    content["model"]["_orig_mod.transformer.wpe.weight"] = torch.zeros(1).expand(32, 48)
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(
        CheckpointError, match=r"holds '_orig_mod.transformer.wpe.weight', which is not a plain"
    ):
        run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_pickle_is_a_sentence(tmp_path, damage):
    nanogpt_file(tmp_path / "ckpt.pt")
    content = bytearray((tmp_path / "ckpt.pt").read_bytes())
    content[-40] ^= 0xFF  # in the directory at the end
    damaged = {"cut": content[: len(content) // 2], "flip": content, "empty": b"", "text": b"not a pickle"}
    (tmp_path / "ckpt.pt").write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save, or it is damaged"):
        run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())


def test_a_compressed_or_large_structure_is_refused(tmp_path, monkeypatch):
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, saved)
    with zipfile.ZipFile(saved) as whole, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in whole.infolist():
            bomb.writestr(entry.filename, whole.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"is compressed, which torch\.save never does"):
        read_pickle(tmp_path / "bomb.pt")
    torch.save(list(range(3_000)), tmp_path / "large.pt")
    monkeypatch.setattr(pickles, "_MAX_BYTES", 1_000)
    with pytest.raises(CheckpointError, match=r"has a structure of 0 MiB, above 0"):
        read_pickle(tmp_path / "large.pt")


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "extra", "shape"])
def test_damaged_files_are_refused_before_anything_is_written(tmp_path, damage):
    from safetensors.torch import save_file

    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-100])
    elif damage == "flip":
        content[12] ^= 0xFF  # in the header: the values themselves have no checksum in this format
        file.write_bytes(content)
    else:
        tensors = load_file(file)
        if damage == "missing":
            del tensors["transformer.h.1.ln_2.bias"]
        elif damage == "extra":
            tensors["transformer.h.1.attn.rotary"] = torch.zeros(2)
        else:
            tensors["transformer.wpe.weight"] = torch.zeros(31, 48)
        save_file(tensors, file)
    words = {
        "missing": "lacks transformer.h.1.ln_2.bias",
        "extra": "holds transformer.h.1.attn.rotary",
        "shape": r"transformer.wpe.weight is \[31, 48\]",
    }
    with pytest.raises(CheckpointError, match=words.get(damage, "is no whole safetensors file")):
        run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_scaled_rotary_positions_are_refused(tmp_path):
    random_model("llama-tied").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    for scaling in ({"type": "linear", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0}):
        path.write_text(json.dumps({**config, "rope_scaling": scaling}))
        with pytest.raises(InputError, match="our decoder computes"):
            run(tmp_path / "theirs", tmp_path / "ours", Wanted())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "relu"}, 'activation_function = "relu"; our decoder computes "gelu_new"'),
        ({"model_type": "bert"}, "is of the kind 'bert'"),
        ({"model_type": ["gpt2"]}, "is of the kind ['gpt2']"),
        ({"n_head": 7}, "not divisible by model.n_heads = 7"),
        ({"n_layer": None}, "impossible value"),
    ],
)
def test_a_configuration_that_our_decoder_does_not_compute_is_refused(tmp_path, change, words):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as caught:
        run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    assert words in str(caught.value)


def test_a_checkpoint_whose_state_is_garbled_is_a_sentence(tmp_path):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    state = tmp_path / "ours/state.json"
    state.write_text(json.dumps({"step": 0}))
    manifest = read_manifest(tmp_path / "ours")
    listed = manifest.files | {"state.json": file_entry(state)}
    (tmp_path / "ours/manifest.json").write_text(replace(manifest, files=listed).to_json())
    with pytest.raises(CheckpointError, match="has a missing or invalid entry: 'vocab_size'"):
        export(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        run(tmp_path / "theirs", tmp_path / "there", Wanted())
    run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    with pytest.raises(InputError, match="exists already"):
        export(tmp_path / "ours", tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_small_tensors_share_a_file_and_large_ones_are_parted(tmp_path, monkeypatch):
    nanogpt_file(tmp_path / "ckpt.pt")
    run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())
    held = [path.name for path in (tmp_path / "ours" / WEIGHTS).iterdir()]
    assert held == ["shard-00001.safetensors"]
    monkeypatch.setattr(importing, "FILE_BYTES", 20_000)
    run(tmp_path / "ckpt.pt", tmp_path / "parted", Wanted())
    parts = sorted((tmp_path / "parted" / WEIGHTS).iterdir())
    counts = [len(load_file(path)) for path in parts]
    assert len(parts) > 1
    assert max(counts) > 1
    for path, count in zip(parts, counts, strict=True):
        assert count == 1 or sum(tensor.nbytes for tensor in load_file(path).values()) <= 20_000


def test_without_a_tokenizer_the_last_id_ends_documents(tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    vocab_size = content["model_args"]["vocab_size"]
    run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())
    assert read_state(tmp_path / "ours")["eod_id"] == vocab_size - 1


def test_a_folder_without_weights_is_a_sentence(tmp_path):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        run(tmp_path / "theirs", tmp_path / "ours", Wanted())


@pytest.mark.parametrize(
    "named",
    [{}, {"a": "../model.safetensors"}, {"a": "model.safetensors", "b": "gone.safetensors"}, [], None],
)
def test_an_index_that_names_other_files_is_a_sentence(tmp_path, named):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    with pytest.raises(CheckpointError, match="names files that are not beside it, or none"):
        run(tmp_path / "theirs", tmp_path / "ours", Wanted())


def test_what_is_allowed_is_named_without_the_default(tmp_path):
    random_model("llama-tied").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_bias": True}))
    with pytest.raises(InputError, match="mlp_bias = true; our decoder computes false only"):
        run(tmp_path / "theirs", tmp_path / "ours", Wanted())


def test_an_export_reads_some_tensors_at_a_time_and_its_files_stay_as_large_as_asked(tmp_path, monkeypatch):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "ours", Wanted())
    asked = []
    read = export_module.read_folder

    def note(path, tensors, group):
        asked.append(list(tensors.values()))
        read(path, tensors, group)

    monkeypatch.setattr(export_module, "read_folder", note)
    monkeypatch.setattr(export_module, "_READ_BYTES", 40_000)
    export(tmp_path / "ours", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"]
    assert len(asked) > 1
    assert all(len(some) <= 3 or sum(t.nbytes for t in some) <= 40_000 for some in asked)


@pytest.mark.parametrize("change", [{"n_layer": "two"}, {"n_head": None}, {"block_size": "x"}])
def test_arguments_of_nanogpt_that_are_garbled_are_a_sentence(tmp_path, change):
    nanogpt_file(tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    torch.save(content | {"model_args": content["model_args"] | change}, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=r"the model_args in .* lack or garble"):
        run(tmp_path / "ckpt.pt", tmp_path / "ours", Wanted())
