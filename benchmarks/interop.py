"""Memory of `shoal export` and `shoal import` for a model of 1.5 billion parameters, GPT-2 XL.

A Hugging Face folder of random weights is imported, exported, and both again; each command is a process
whose anonymous memory is sampled. It may exceed one output file by 1 GB. Needs 32 GB of disk.

    python -m benchmarks.interop [--layers 48] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write_record

VOCAB_SIZE = 50_257


def write_random(folder: Path, layers: int) -> None:
    """Write a Hugging Face folder with a file for each tensor."""
    import torch
    from safetensors.torch import save_file

    from shoal.config.sections import Model
    from shoal.interop.hugging_face import config_json
    from shoal.interop.tables import table
    from shoal.models.decoder import Decoder
    from shoal.models.shape import resolve_shape

    folder.mkdir(parents=True)
    model = Model(n_layers=layers, d_model=1600, n_heads=25, pad_vocab_multiple=1)
    shape = resolve_shape(model, VOCAB_SIZE)
    with torch.device("meta"):
        sizes = {name: list(weight.shape) for name, weight in Decoder(shape).named_weights().items()}
    files = {}
    for number, entry in enumerate(table("gpt2", shape)):
        rows, *rest = sizes[entry.ours[0]]
        size = [rows * len(entry.ours), *rest]
        tensor = torch.randn(size[::-1] if entry.transposed else size) * 0.02
        files[entry.theirs] = f"part-{number:05d}.safetensors"
        save_file({entry.theirs: tensor}, folder / files[entry.theirs])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config_json(shape, VOCAB_SIZE - 1)))


def measured(*words: str) -> dict[str, Any]:
    """Run a command of `shoal`; return its seconds and the most anonymous memory it had."""
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "shoal", *words])
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(kib) << 10 for kib in re.findall(r"RssAnon:\s+(\d+)", status))])
        time.sleep(0.02)
    if process.wait():
        sys.exit(f"error: shoal {words[0]} ended with status {process.returncode}")
    return {"seconds": round(time.perf_counter() - began, 1), "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--folder", type=Path)
    wish = parser.parse_args()
    from shoal.interop.export import SHARD_BYTES
    from shoal.runtime.files import hash_file

    with tempfile.TemporaryDirectory(dir=wish.folder) as name:
        folder = Path(name)
        writer = multiprocessing.get_context("spawn").Process(
            target=write_random, args=(folder / "theirs", wish.layers)
        )
        writer.start()
        writer.join()
        figures = {
            "import": measured("import", str(folder / "theirs"), str(folder / "ours")),
            "export": measured("export", str(folder / "ours"), str(folder / "first"), "--no-prove"),
        }
        measured("import", str(folder / "first"), str(folder / "again"))
        measured("export", str(folder / "again"), str(folder / "second"), "--no-prove")
        digests = [
            {file.name: hash_file(file) for file in sorted((folder / part).glob("*.safetensors"))}
            for part in ("first", "second")
        ]
    limit = SHARD_BYTES + 10**9
    record = {
        "claim": "at most one output file and 1 GB of memory; in, out, in and out again gives equal bytes",
        "limit_bytes": limit,
        "parameters": wish.layers * (12 * 1600**2 + 13 * 1600) + (VOCAB_SIZE + 1024 + 2) * 1600,
        "files": len(digests[0]),
        "equal_bytes": digests[0] == digests[1],
        **figures,
    }
    if wish.layers == parser.get_default("layers"):
        write_record("interop", record)
    print({name: f"{one['peak_bytes'] / 1e9:.2f} GB, {one['seconds']} s" for name, one in figures.items()})
    if digests[0] != digests[1] or any(one["peak_bytes"] > limit for one in figures.values()):
        sys.exit("error: the claim does not hold")


if __name__ == "__main__":
    main()
