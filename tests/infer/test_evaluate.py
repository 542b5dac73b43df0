"""Every target is scored once, with the context it should have; figures equal transformers'."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from shoal.data.texts import read_passages
from shoal.data.tokenizer import bytes_tokenizer_json
from shoal.errors import DataError, InputError
from shoal.infer.evaluate import evaluate
from shoal.infer.load import load_text_model
from shoal.infer.measure import Measure
from shoal.infer.score import score, sliding_spans
from tests import commands
from tests.cases import every
from tests.shared import SHARED
from tests.tiny_dataset import random_dataset, with_other_tokenizer

CPU = torch.device("cpu")
LETTERS = bytes(range(33, 127))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_text_model(trained_run, CPU)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30, 33])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_target_is_scored_once(length, stride):
    tokens = np.arange(length)
    spans = sliding_spans(tokens, 8, stride)
    scored = [token for span in spans for token in list(span.tokens)[span.first :]]
    assert scored == list(range(1, length))
    for span in spans[1:]:
        assert len(span.tokens) <= 9
        assert span.first >= 8 - stride + 1  # context


def nats(decoder, tokens):
    """Return the loss of the last of some tokens, alone in its batch."""
    with torch.inference_mode():
        logits = decoder(torch.tensor([tokens[:-1]]))[0, -1].double()
    return F.cross_entropy(logits, torch.tensor(tokens[-1])).item()


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_windows_give_the_brute_force_value(loaded, stride):
    tokens = np.random.default_rng(0).integers(0, 256, 70)
    spans = sliding_spans(tokens, 16, stride)
    total = sum(one.loss for n in range(0, len(spans), 3) for one in score(loaded.model, spans[n : n + 3]))
    brute = 0.0
    for target in range(1, len(tokens)):
        begin = 0 if target <= 16 else -(-(target - 16) // stride) * stride
        brute += nats(loaded.model, tokens[begin : target + 1].tolist())
    assert total == pytest.approx(brute, rel=1e-6)


def test_a_text_is_measured_by_token_and_by_byte(loaded, tmp_path):
    text = "One fish, two fish, r\u00e9d fish.\n" * 9
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    found = evaluate(loaded, Measure(text=tmp_path / "text.txt", seq_len=16, stride=4))
    (one,) = found.values()
    assert one["tokens"] == one["bytes"] == len(text.encode())  # the tokenizer's ids are bytes
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
    assert one["bits_per_byte"] == pytest.approx(one["loss"] / math.log(2))


def test_wikitext_counts_the_words_of_the_original(loaded, tmp_path):
    (tmp_path / "wiki.tokens").write_text("The cat , which sat , was big . \n" * 20)
    (one,) = evaluate(loaded, Measure(wikitext=tmp_path / "wiki.tokens", seq_len=16)).values()
    assert one["words"] == 180
    assert one["bytes"] == len("The cat, which sat, was big.\n") * 20
    assert one["word_perplexity"] == pytest.approx(math.exp(one["loss_sum"] / 180))


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """Return a random model of transformers, and its folder with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=257)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # strong opinions
        model.transformer.wte.weight[:32], model.transformer.wte.weight[127:] = 0, 0  # letters are likeliest
    folder = tmp_path_factory.mktemp("hf") / "model"
    model.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": 256})
    )
    (folder / "tokenizer.json").write_text(bytes_tokenizer_json())
    return model, folder


@torch.inference_mode()
def endings(model, text, count):
    """Return passages whose last word, with the space before it, is what the model finds likeliest."""
    found, data = [], text.encode("ascii", "ignore")
    for begin in range(len(data) - 50):
        tokens = list(data[begin : begin + 40])
        for wanted in (b" ", LETTERS, LETTERS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] not in wanted:
                break
        else:
            found.append([bytes(tokens[:40]).decode(), bytes(tokens[41:]).decode()])
        if len(found) == count:
            return found
    raise AssertionError("too few")


def test_last_words_are_those_of_transformers_model(hugging_face, tmp_path):
    theirs, folder = hugging_face
    source = SHARED / "data/eval/lambada_test.jsonl"
    if source.is_file():
        lines = [json.loads(line)["text"] for line in source.read_text().splitlines()[:200]]
    else:
        pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
        lines = [line for line in pages.splitlines() if line.isascii() and line.count(" ") > 15][:200]
    passages = [text.rsplit(" ", 1) for text in lines]
    passages += endings(theirs, " ".join(lines), count=5)
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(pair)}) + "\n" for pair in passages))
    hits, nats_of_words = 0, 0.0
    for context, word in read_passages(file):
        whole, target = list((context + word).encode())[-65:], len(word.encode())
        with torch.inference_mode():
            logits = theirs(torch.tensor([whole[:-1]])).logits[0, -target:].double()
        wanted = torch.tensor(whole[-target:])
        hits += bool((logits.argmax(dim=-1) == wanted).all())
        nats_of_words += F.cross_entropy(logits, wanted, reduction="sum").item()
    (one,) = evaluate(load_text_model(folder, CPU), Measure(lambada=file)).values()
    assert one["passages"] == len(passages)
    assert one["accuracy"] == hits / len(passages)
    assert 0 < hits < len(passages)
    assert math.log(one["perplexity"]) == pytest.approx(nats_of_words / len(passages), rel=1e-5)


def evaluated(target, *words):
    done = commands.run("evaluate", *words, "--json", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(Path(target).read_text())


@pytest.mark.parametrize("how", every(3, ["--nproc 2", "--tp 2", "--tp 2 --nproc 4"]))
def test_the_command_gives_the_same_figures_on_any_number_of_processes(trained_run, tmp_path, how):
    (tmp_path / "text.txt").write_text("a text that nobody trained on. " * 40)
    sizes = ("--seq-len", "16", "--stride", "8", "--batch-size", "4")
    words = [trained_run, "--text", tmp_path / "text.txt", *sizes]
    alone = evaluated(tmp_path / "1.json", *words)
    several = evaluated(tmp_path / "several.json", *words, *how.split())
    if "--tp" not in how:
        assert several == alone
    (cut,), (one,) = several.values(), alone.values()
    assert cut["tokens"] == one["tokens"]
    assert cut["loss"] == pytest.approx(one["loss"], rel=2e-6)


def test_without_a_text_the_split_it_was_trained_with_is_measured(trained_run):
    done = commands.run("evaluate", trained_run)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    written = trained_run / "checkpoints/step-00000004.evaluation.json"
    (one,) = json.loads(written.read_text()).values()
    assert one["perplexity"] > 1
    assert str(written) in done.stdout
    written.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "nosuch.txt"], "nosuch.txt is not a file"),
        (["--limit", "5"], "--limit and --task-folder are for tasks"),
        (["--tasks", "mine", "--task-folder", "nowhere"], "nowhere is not a folder"),
        (["--stride", "999"], "would leave targets out"),
        (["--seq-len", "99999"], "beyond the model's"),
        (["--split", "test", "--batch-size", "0"], "--batch-size 0 is not allowed"),
        (["--tp", "2", "--nproc", "3"], "--tp 2 with 3 processes"),
    ],
)
def test_what_cannot_be_measured_is_said(trained_run, words, said):
    done = commands.run("evaluate", trained_run, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_dataset_of_another_vocabulary_is_refused(loaded, tmp_path):
    from tests.tiny_dataset import write_dataset

    other = write_dataset(tmp_path / "other", {"validation": [np.arange(50)]}, 300, 299)
    with pytest.raises((DataError, InputError), match="has 300 token ids, end of document 299"):
        evaluate(loaded, Measure(data=other))


def test_data_with_another_tokenizer_of_the_same_size_is_refused(loaded, tmp_path, caplog):
    other = with_other_tokenizer(random_dataset(tmp_path / "other"))
    with pytest.raises(DataError, match=r"other/tokenizer.json is another tokenizer than .*step-00000004"):
        evaluate(loaded, Measure(data=other))
    assert evaluate(loaded, Measure(data=other, allow_tokenizer_mismatch=True))
    assert "is another tokenizer" in caplog.text
