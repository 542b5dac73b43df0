"""Small files that ask for much: each is a sentence, in little time and memory, through the real commands."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint.importing import Wanted, run
from shoal.data.tokenizer import bytes_tokenizer_json
from tests.checkpoint.damage import forge_manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MAX_GROWTH, MAX_SECONDS = 200 << 20, 4.0  # of processor time: others may use this machine, too

# Runs commands one after the other in one process; prints how each ended, and the memory and time it took.
RUNNER = """
import contextlib, io, json, re, signal, sys, time
import shoal.cli, shoal.checkpoint.importing, shoal.infer.terminal, shoal.data.prepare.run, transformers

def peak(kind):
    return int(re.search(rf"{kind}:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

for name, words in json.load(open(sys.argv[1])).items():
    open("/proc/self/clear_refs", "w").write("5")
    before, began, said, status = peak("VmRSS"), time.process_time(), io.StringIO(), "no exit"
    signal.alarm(60)
    sys.argv = ["shoal", *words]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            shoal.cli.main()
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)[:200]
    took = peak("VmHWM") - before, time.process_time() - began
    print(json.dumps([name, status, said.getvalue(), *took]), flush=True)
"""


def nanogpt(**changes):
    """Return the content of a nanoGPT file of one layer, 8 wide."""
    shapes = {"wte.weight": (16, 8), "wpe.weight": (4, 8), "ln_f.weight": (8,)}
    shapes |= {f"h.0.{name}.weight": (8,) for name in ("ln_1", "ln_2")}
    shapes |= {"h.0.attn.c_attn.weight": (24, 8), "h.0.attn.c_proj.weight": (8, 8)}
    shapes |= {"h.0.mlp.c_fc.weight": (32, 8), "h.0.mlp.c_proj.weight": (8, 32)}
    tensors = {f"transformer.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 16, "bias": False}
    steps = changes.pop("iter_num", 3)
    return {"model": tensors, "model_args": {**args, **changes}, "iter_num": steps}


def torch_file(path: Path, structure: bytes) -> None:
    """Write a file of torch.save around a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": structure, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)


class Bomb:
    """An object whose unpickling takes a gigabyte."""

    def __reduce__(self):
        return bytearray, (1 << 30,)


def doubling(kind: bytes, levels: int) -> bytes:
    """Return a pickle in which each of many containers holds the one before twice, as a key of a dict."""
    body = b"\x80\x02}" + (b"]" if kind == b"l" else b")") + b"q\x00"
    for level in range(levels):
        body += b"0" + (b"]" + b"h" + bytes([level]) + b"ah" + bytes([level]) + b"a" if kind == b"l" else b"")
        body += b"" if kind == b"l" else b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
        body += b"q" + bytes([level + 1])
    return body + b"K\x01s."


def pickles(folder: Path) -> dict[str, Path]:
    """Write pickles that ask for memory or time."""
    made = {
        "bytearray": pickle.dumps({"model": Bomb(), "model_args": {}, "padding": "x" * 5600}, 2),
        "tuples": doubling(b"t", 100),
        "lists": doubling(b"l", 100),
        "a number of 100 MB": b"\x80\x02\x8b" + struct.pack("<i", 100 << 20) + b"\x01.",
        "a text of 2 GB": b"\x80\x02X" + struct.pack("<I", 2 << 30) + b"x.",
        "many": b"\x80\x02]" + b"K\x01a" * 400_000 + b".",
        "a counter": b"\x80\x02ccollections\nCounter\n}\x85R.",
    }
    for name, structure in made.items():
        torch_file(folder / f"{name}.pt", structure)
        (folder / f"{name}, old.pt").write_bytes(structure)
    return {path.stem: path for path in folder.glob("*.pt")}


def contents(folder: Path) -> dict[str, Path]:
    """Write nanoGPT's files with numbers that no model has."""
    odd = {
        "steps without end": {"iter_num": float("inf")},
        "steps that are none": {"iter_num": float("nan")},
        "steps below 0": {"iter_num": -1},
        "steps of a list": {"iter_num": [1] * 1000},
        "layers": {"n_layer": 100_000_000},
        "width": {"n_embd": 2**40},
        "width of 2,000 digits": {"n_embd": 10**2000},
        "vocabulary": {"vocab_size": 2**50},
        "positions": {"block_size": 2**45},
        "endless vocabulary": {"vocab_size": float("inf")},
    }
    for name, changes in odd.items():
        torch.save(nanogpt(**changes), folder / f"{name}.pt")
    return {name: folder / f"{name}.pt" for name in odd}


def hugging_face(folder: Path) -> dict[str, Path]:
    """Write folders of transformers whose configuration is not of their tensors."""
    config = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 8,
        "n_positions": 4,
        "vocab_size": 16,
    }
    whole = json.dumps(config)
    texts = {
        "hf layers": whole.replace('"n_layer": 1', '"n_layer": 100000000'),
        "hf width": whole.replace('"n_embd": 8', f'"n_embd": {2**40}'),
        "hf endless": whole.replace("16", "Infinity"),
        "hf overflow": whole.replace("16", "1e999"),
        "hf digits": whole.replace("16", "1" * 5000),
        "hf deep": "[" * 200_000,
        "hf deep object": '{"a":' * 200_000,
    }
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
        save_file(nanogpt()["model"], folder / name / "model.safetensors")
    header = folder / "hf header"
    shutil.copytree(folder / "hf width", header)
    (header / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return {path.name: path for path in folder.iterdir()}


def checkpoints(folder: Path) -> dict[str, Path]:
    """Make a checkpoint of ours, then strangers' copies of it with other settings and fitting digests."""
    torch.save(nanogpt(), folder / "good.pt")
    run(folder / "good.pt", folder / "step-00000003", Wanted())
    good = (folder / "step-00000003/config.toml").read_text()
    state = (folder / "step-00000003/state.json").read_text()
    changes = {
        "our layers": ("config.toml", good.replace("n_layers = 1\n", "n_layers = 100000000\n")),
        "our width": ("config.toml", good.replace("d_model = 8\n", f"d_model = {2**40}\n")),
        "our digits": ("config.toml", good.replace("d_model = 8\n", f"d_model = {'1' * 5000}\n")),
        "our vocabulary": ("state.json", state.replace('"vocab_size": 16', '"vocab_size": 1e999')),
    }
    for name, (file, text) in changes.items():
        assert text not in (good, state), name
        checkpoint = folder / name / "step-00000003"
        shutil.copytree(folder / "step-00000003", checkpoint)
        (checkpoint / file).write_text(text)
        forge_manifest(checkpoint)
    return {name: folder / name / "step-00000003" for name in changes}


def corpora(folder: Path) -> dict[str, Path]:
    """Write small packed files of one line without end, and tokenizers that grow a text without end."""
    with (
        gzip.open(folder / "endless.jsonl.gz", "wb") as gz,
        pa.output_stream(str(folder / "endless.jsonl.zst"), compression="zstd") as zst,
    ):
        for _ in range(400):
            gz.write(b"a" * (1 << 20))
            zst.write(b"a" * (1 << 20))
    return {path.name: path for path in folder.iterdir()}


def tokenizers(folder: Path) -> dict[str, Path]:
    """Write tokenizers that make a long text of a short one."""
    double = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
    between = [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "ab"}] * 40
    changes = {
        "doubling": {"normalizer": {"type": "Sequence", "normalizers": double}},
        "between": {"normalizer": {"type": "Sequence", "normalizers": between}},
        "long": {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}},
        "before": {"normalizer": {"type": "Prepend", "prepend": "b" * 10_000_000}},
        "decoder": {"decoder": {"type": "Sequence", "decoders": double}},
    }
    for name, change in changes.items():
        (folder / f"{name}.json").write_text(json.dumps({**json.loads(bytes_tokenizer_json()), **change}))
    return {f"tokenizer {name}": folder / f"{name}.json" for name in changes}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run every command once; return how each ended, by name."""
    root = tmp_path_factory.mktemp("hostile")
    commands: dict[str, list[str]] = {}
    text = root / "text.txt"
    text.write_text("banana " * 1000)
    for make in (pickles, contents, hugging_face, checkpoints, corpora, tokenizers):
        folder = root / make.__name__
        folder.mkdir()
        for name, path in make(folder).items():
            out = str(root / f"out of {name}")
            if make is checkpoints:
                commands[name] = ["generate", str(path), "--prompt", "a", "--device", "cpu"]
            elif make is corpora:
                commands[name] = ["prepare", str(path), "--output", out, "--tokenizer", "bytes"]
            elif make is tokenizers:
                commands[name] = ["prepare", str(text), "--output", out, "--tokenizer", str(path)]
            else:
                commands[name] = ["import", str(path), out]
    digits = root / "digits.toml"
    digits.write_text(f"[train]\nsteps = {'1' * 5000}\n")
    (root / "deep.toml").write_text("a = " + "[" * 100_000)
    commands |= {name: ["train", str(root / f"{name}.toml")] for name in ("digits", "deep")}
    (root / "commands.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, root / "commands.json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = {name: ending for name, *ending in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == commands.keys(), (commands.keys() - found.keys(), done.stderr[-2000:])
    return found


def test_every_small_hostile_file_is_a_sentence_in_little_time_and_memory(ended):
    wrong = {
        name: (status, said[:300], growth >> 20, round(seconds, 1))
        for name, (status, said, growth, seconds) in ended.items()
        if status not in (1, 2) or "error: " not in said or growth > MAX_GROWTH or seconds > MAX_SECONDS
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bytearray", "asks for __builtin__.bytearray: refused"),
        ("tuples", "grows without end"),
        ("lists", "grows without end"),
        ("many", "structure of more than"),
        ("a counter", "asks for collections.Counter"),
        ("steps without end", "has iter_num = inf, which is no number of steps"),
        ("steps that are none", "has iter_num = nan"),
        ("steps below 0", "has iter_num = -1"),
        ("layers", "100000000 layers"),
        ("width", "take more numbers than the files hold"),
        ("positions", "take more numbers than the files hold"),
        ("hf layers", "100000000 layers"),
        ("hf width", "take more numbers than the files hold"),
        ("hf endless", "impossible value"),
        ("our layers", "take more numbers than the files hold"),
        ("our width", "take more numbers than the files hold"),
        ("our digits", "is not valid TOML"),
        ("digits", "is not valid TOML"),
        ("endless.jsonl.gz", "has a line of more than 256 MiB"),
        ("endless.jsonl.zst", "has a line of more than 256 MiB"),
        ("tokenizer doubling", "its normalizer makes 1.1e+12 characters of one"),
        ("tokenizer decoder", "its decoder makes"),
        ("tokenizer before", "its normalizer makes"),
    ],
)
def test_the_sentence_names_what_is_wrong(ended, name, words):
    assert words in ended[name][1]


def test_a_file_of_torch_save_with_all_that_it_may_hold_is_read(tmp_path):
    from shoal.checkpoint.pickles import read_pickle

    tensor = torch.nn.Parameter(torch.arange(4.0))
    content = {"a": OrderedDict(b=tensor, c=torch.ones(2, dtype=torch.bfloat16)), "d": (1, 2.5, None, b"x")}
    shared = (0.9, 0.95)
    content["groups"] = [{"betas": shared, "size": torch.Size([3]), "dtype": torch.float16}] * 50
    for legacy in (False, True):
        torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
        read = read_pickle(tmp_path / "file.pt")
        assert torch.equal(read["a"]["b"], tensor)
        assert read["groups"] == content["groups"]
