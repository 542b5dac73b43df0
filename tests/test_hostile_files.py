"""Small files that ask for much: each is a sentence, in little time and memory, through the real commands."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from shoal.data.bytelevel import BYTE_OF
from shoal.data.dataset import seal
from shoal.data.tokenizer import bytes_tokenizer_json
from shoal.interop.importing import Wanted, run
from tests.checkpoint.damage import forge_manifest
from tests.tiny_dataset import random_dataset

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MAX_GROWTH, MAX_SECONDS = 200 << 20, 1.0  # of processor time: others may use this machine, too

# Runs commands one after the other in one process; prints how each ended, and the memory and time it took,
# then the most memory of any of its processes so far, and their time. Orphans come to it, and are waited for.
RUNNER = """
import contextlib, ctypes, io, json, os, re, resource, signal, sys, time
import shoal.cli.app, shoal.interop.importing, shoal.infer.terminal, shoal.data.prepare.run, transformers

def peak(kind):
    return int(re.search(rf"{kind}:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

def children():
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_maxrss << 10, used.ru_utime + used.ru_stime

def late(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, late)
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
for name, words in json.load(open(sys.argv[1])).items():
    open("/proc/self/clear_refs", "w").write("5")
    of_children = children()[1]
    before, began, said, status = peak("VmRSS"), time.process_time(), io.StringIO(), "no exit"
    signal.alarm(60)
    sys.argv = ["shoal", *words]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            shoal.cli.app.main()
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)[:200]
    took = peak("VmHWM") - before, time.process_time() - began
    most, theirs = children()
    print(json.dumps([name, status, said.getvalue(), *took, most, theirs - of_children]), flush=True)
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
    thin = nanogpt(n_layer=1_000_000, n_embd=1, n_head=1)
    thin["model"]["transformer.wide"] = torch.zeros(1 << 24)  # more numbers than all the layers have
    torch.save(thin, folder / "thin layers.pt")
    return {name: folder / f"{name}.pt" for name in (*odd, "thin layers")}


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
    """Write small files whose text is endless, in lines, fields, pages or blank lines."""
    packed = {"endless.jsonl": b"a" * (1 << 20), "blank.jsonl": b"\n" * (1 << 20)}
    for name, block in packed.items():  # of 300 parts, one after the other
        (folder / f"{name}.gz").write_bytes(gzip.compress(block) * 300)
        (folder / f"{name}.zst").write_bytes(pa.compress(block, codec="zstd", asbytes=True) * 300)
    (folder / "line.csv").write_bytes(b"text\n" + b"a" * (40 << 20))
    (folder / "quote.csv").write_bytes(b'text\n"' + (b"a" * (1 << 20) + b"\n") * 33)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), ["a" * (4 << 20)])
    for name, column in {"repeated": repeated, "page": pa.array(["a" * (300 << 20)])}.items():
        path = folder / f"{name}.parquet"
        parquet.write_table(
            pa.table({"text": column}), path, compression="zstd", use_dictionary=name != "page"
        )
    with zipfile.ZipFile(folder / "zeros.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", bytes(300 << 20))
    head = b"\x00\x00\x08\x03" + struct.pack(">3I", 300, 1 << 10, 1 << 10)
    packed_images = gzip.compress(head) + gzip.compress(bytes(1 << 20)) * 300
    (folder / "zeros-images-idx3-ubyte.gz").write_bytes(packed_images)
    (folder / "claims-images-idx3-ubyte").write_bytes(head[:4] + b"\xff" * 12)
    for name in ("zeros", "claims"):
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + struct.pack(">I", 0))
    headers = {"shape": "(1099511627776, 8)", "digits": f"({'1' * 5000},)", "deep": "(" * 5000}
    for name, shape in headers.items():
        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        with zipfile.ZipFile(folder / f"{name}.npz", "w") as archive:
            for member in ("x.npy", "y.npy"):
                archive.writestr(member, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return {path.name: path for path in folder.iterdir() if "labels" not in path.name}


def datasets(folder: Path) -> dict[str, Path]:
    """Make a dataset, then strangers' copies of it with other facts and fitting digests."""
    random_dataset(folder / "good")
    changes: dict[str, Any] = {
        "overflow": {"vocab_size": float("inf")},
        "huge vocabulary": {"vocab_size": 2**60},
        "no vocabulary": {"vocab_size": -1},
        "a tokenizer elsewhere": {"tokenizer": {"file": "../good/manifest.json", "xxh3": ""}},
        "no splits": {"splits": [[[]]]},
        "deep": {"splits": {"train": {"bin_xxh3": {}}}},
    }
    for name, change in changes.items():
        shutil.copytree(folder / "good", folder / name)
        manifest = {**json.loads((folder / name / "manifest.json").read_text()), **change}
        manifest.pop("digest", None)
        (folder / name / "manifest.json").write_text(json.dumps(seal(manifest)))
    shutil.copytree(folder / "good", folder / "counts")
    content = (folder / "good/train.idx").read_bytes()
    (folder / "counts/train.idx").write_bytes(content[:18] + b"\xff" * 16 + content[34:])
    shutil.copytree(folder / "good", folder / "nested")
    (folder / "nested/manifest.json").write_text("[" * 200_000)
    return {f"dataset {path.name}": path for path in folder.iterdir() if path.name != "good"}


def megatron(folder: Path) -> dict[str, Path]:
    """Write Megatron's folders with numbers that no model has."""
    tensors = {"word_embeddings.weight": (16, 8), "position_embeddings.weight": (4, 8)}
    tensors |= {"transformer.layers.0.mlp.dense_h_to_4h.weight": (32, 8)}
    model = {name: torch.zeros(shape) for name, shape in tensors.items()}
    layers = {**model, "transformer.layers.99999999999.mlp.dense_h_to_4h.weight": torch.zeros(1)}
    contents: dict[str, Any] = {
        "layer": {"model": layers},
        "digits": {"model": {**model, f"transformer.layers.{'1' * 5000}.x": torch.zeros(1)}},
        "iteration": {"model": model, "iteration": float("inf")},
        "args": {"model": model, "args": Namespace(num_layers=2**60), "iteration": 10**2000},
        "no dims": {"model": {**model, "word_embeddings.weight": torch.zeros(())}},
        "names": {"model": {"word_embeddings.weight": [2**60, 2**60]}},
        "repeated": {"model": {**model, "word_embeddings.weight": torch.zeros(1).expand(2**40, 8)}},
        "optimizer": {"model": model, "optimizer": {"state": {0: {"step": float("inf")}}}},
    }
    for name, content in contents.items():
        (folder / name / "mp_rank_00").mkdir(parents=True)
        torch.save(content, folder / name / "mp_rank_00/model_optim_rng.pt")
    (folder / "tracker").mkdir()
    (folder / "tracker/latest_checkpointed_iteration.txt").write_text("9" * 5000)
    return {f"megatron {path.name}": path for path in folder.iterdir()}


def tokenizers(folder: Path) -> dict[str, Path]:
    """Write tokenizers that make a long text of a short one."""
    double = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
    between = [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "ab"}] * 40
    split = {"type": "Split", "pattern": {"Regex": r"([a-z ]+)+\d"}, "behavior": "Isolated", "invert": False}
    stages = json.loads(bytes_tokenizer_json())["pre_tokenizer"] | {"use_regex": False}
    changes = {
        "doubling": {"normalizer": {"type": "Sequence", "normalizers": double}},
        "between": {"normalizer": {"type": "Sequence", "normalizers": between}},
        "long": {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}},
        "before": {"normalizer": {"type": "Prepend", "prepend": "b" * 10_000_000}},
        "backtracking": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, stages]}},
        "decoder": {"decoder": {"type": "Sequence", "decoders": double}},
    }
    for name, change in changes.items():
        (folder / f"{name}.json").write_text(json.dumps({**json.loads(bytes_tokenizer_json()), **change}))
    files = {name: folder / f"{name}.json" for name in changes}
    pairs = {
        "unknown": (dict(BYTE_OF), "a b"),
        "id": ({**BYTE_OF, "ab": 2**31}, ""),
        "negative": ({**BYTE_OF, "ab": -5}, ""),
        "text": ({**BYTE_OF, "ab": "x"}, ""),
        "three": (dict(BYTE_OF), "a b c"),
        "list": ([], "\n" * 1_000_000),
    }
    for name, (vocab, merges) in pairs.items():
        files[name] = folder / name
        files[name].mkdir()
        (files[name] / "vocab.json").write_text(json.dumps(vocab))
        (files[name] / "merges.txt").write_text(merges)
    return {f"tokenizer {name}": path for name, path in files.items()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run every command once; return how each ended, by name."""
    root = tmp_path_factory.mktemp("hostile")
    commands: dict[str, list[str]] = {}
    text = root / "text.txt"
    text.write_text("banana " * 1000)
    commands["good"] = ["prepare", str(text), "--output", str(root / "good"), "--tokenizer", "bytes"]
    makers = (pickles, contents, hugging_face, megatron, checkpoints, datasets, corpora, tokenizers)
    for make in makers:
        folder = root / make.__name__
        folder.mkdir()
        for name, path in make(folder).items():
            out = str(root / f"out of {name}")
            is_text = path.suffix != ".npz" and "idx" not in name
            bytewise = ["--tokenizer", "bytes", "--workers", "1"] if is_text else []
            if make is checkpoints:
                commands[name] = ["generate", str(path), "--prompt", "a", "--device", "cpu"]
            elif make is datasets:
                commands[name] = ["dataset", "show", str(path)]
            elif make is corpora:
                commands[name] = ["prepare", str(path), "--output", out, *bytewise]
            elif make is tokenizers:
                commands[name] = ["prepare", str(text), "--output", out, "--tokenizer", str(path)]
            else:
                told = ["--n-heads", "2", "--vocab-size", "16"] if make is megatron else []
                commands[name] = ["import", str(path), out, *told]
            if make is hugging_face:
                commands[f"{name} as --init"] = ["train", "tiny", "--init", str(path), "-o", out]
    digits = root / "digits.toml"
    digits.write_text(f"[train]\nsteps = {'1' * 5000}\n")
    (root / "deep.toml").write_text("a = " + "[" * 100_000)
    commands |= {name: ["train", str(root / f"{name}.toml")] for name in ("digits", "deep")}
    # Again at the end: what a good one takes differs with what else the machine does.
    commands["good again"] = [*commands["good"][:3], str(root / "good again"), "--tokenizer", "bytes"]
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


def seconds_to_unpack():
    """Return the processor time that 256 MiB take to unpack, which a line too long costs at least."""
    packed, began = gzip.compress(bytes(1 << 28), 1), time.process_time()
    assert len(gzip.decompress(packed)) == 1 << 28
    return time.process_time() - began


def test_every_small_hostile_file_is_a_sentence_in_little_time_and_memory(ended):
    allowed_s = max(MAX_SECONDS, 3 * seconds_to_unpack())  # 1 s where the machine is fast enough for that
    good = [ended[name][-2:] for name in ("good", "good again")]
    workers_bytes, workers_s = (max(values) for values in zip(*good, strict=True))
    wrong = {
        name: (status, said[-300:], growth >> 20, round(seconds, 2), most >> 20, round(theirs, 2))
        for name, (status, said, growth, seconds, most, theirs) in ended.items()
        if status not in (1, 2)
        or "error: " not in said
        or growth > MAX_GROWTH
        or seconds > allowed_s
        or most > workers_bytes + MAX_GROWTH
        or theirs > workers_s + allowed_s
    }
    assert wrong.keys() == {"good", "good again"}, wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bytearray", "asks for __builtin__.bytearray, which"),
        ("tuples", "grows without end"),
        ("lists", "grows without end"),
        ("many", "structure of more than"),
        ("a counter", "asks for collections.Counter"),
        ("steps without end", "has iter_num = inf, which is no number of steps"),
        ("steps that are none", "has iter_num = nan"),
        ("steps below 0", "has iter_num = -1"),
        ("layers", "100000000 layers"),
        ("thin layers", "fewer tensors than 1000000 layers"),
        ("width", "take more numbers than the files hold"),
        ("positions", "take more numbers than the files hold"),
        ("hf layers", "100000000 layers"),
        ("hf layers as --init", "take more numbers than the files hold"),
        ("hf width", "take more numbers than the files hold"),
        ("hf endless", "impossible value"),
        ("our layers", "take more numbers than the files hold"),
        ("our width", "take more numbers than the files hold"),
        ("our digits", "is not valid TOML"),
        ("digits", "is not valid TOML"),
        ("quote.csv", "field larger than field limit"),
        ("line.csv", "has a line of more than 32 MiB"),
        ("blank.jsonl.gz", "blank lines one after the other"),
        ("page.parquet", "column 'text' unpacks from"),
        ("repeated.parquet", "repeats a text too many times"),
        ("zeros.npz", "are allowed"),
        ("zeros-images-idx3-ubyte.gz", "are allowed"),
        ("claims-images-idx3-ubyte", "are allowed"),
        ("deep.npz", "deep.npz cannot be read"),
        ("dataset overflow", "has a missing or invalid entry:"),
        ("dataset huge vocabulary", "has a missing or invalid entry: vocab_size"),
        ("dataset counts", "its header asks for"),
        ("megatron iteration", "has iteration = inf"),
        ("megatron tracker", "names no iteration"),
        ("tokenizer backtracking", "retry-limit-in-match over"),
        ("tokenizer unknown", "do not fit together"),
        ("tokenizer id", "2,147,483,649 ids"),
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
    from shoal.interop.pickles import read_pickle

    tensor = torch.nn.Parameter(torch.arange(4.0))
    content = {"a": OrderedDict(b=tensor, c=torch.ones(2, dtype=torch.bfloat16)), "d": (1, 2.5, None, b"x")}
    shared = (0.9, 0.95)
    content["groups"] = [{"betas": shared, "size": torch.Size([3]), "dtype": torch.float16}] * 50
    for legacy in (False, True):
        torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
        read = read_pickle(tmp_path / "file.pt")
        assert torch.equal(read["a"]["b"], tensor)
        assert read["groups"] == content["groups"]
