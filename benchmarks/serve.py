"""`shoal serve` under load: tokens/s beside `generate`, the wait for a first token, and no answer mixed up.

A server of its own process, over loopback, greedy texts of 64 tokens after prompts of 32. First 8 clients at
a time, beside `generate` with a batch of 8, in turns; then 64 clients for a minute. Every answer is compared
with what `generate` writes for that prompt alone.

    python -m benchmarks.serve [--seconds 60] [--clients 64] [--shape small]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import SHAPES
from benchmarks.record import write_record
from shoal.infer.load import TextModel, load_text_model
from shoal.infer.sampling import Sampling
from shoal.infer.text import complete, prompt_rows
from shoal.interop.importing import Wanted
from shoal.interop.importing import run as import_checkpoint

NEW, PROMPT, BATCH, PROMPTS = 64, 32, 8, 64
TURN_S, TURNS = 8.0, 5
FLOOR = 0.8  # of generate's tokens/s
GREEDY = Sampling(temperature=0)


@dataclass
class Answer:
    """What one request got."""

    prompt: int
    text: str
    tokens: int
    first_s: float
    whole_s: float


def make_model(shape: str, folder: Path) -> TextModel:
    """Make a random model with a tokenizer of one word for each id, as a checkpoint in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**SHAPES[shape], bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "made")
    words = {"<|endoftext|>": 0, **{f"w{n}": n for n in range(1, config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(folder / "tokenizer.json"))
    import_checkpoint(folder / "made", folder / "model", Wanted(tokenizer=folder / "tokenizer.json"))
    return load_text_model(folder / "model", torch.device("cpu"))


@contextmanager
def serving(model: Path) -> Iterator[int]:
    """Run the command until the block ends; yield its port."""
    command = [sys.executable, "-m", "shoal", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://127\.0\.0\.1:(\d+)/ ", line):
                    yield int(found[1])
                    break
        finally:
            process.terminate()


async def ask(port: int, prompt: int, text: str) -> Answer:
    """Stream one completion."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wish = {"prompt": text, "max_tokens": NEW, "temperature": 0, "stream": True}
    body = json.dumps({**wish, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    pieces, tokens, first_s = [], 0, 0.0
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            first_s = first_s or time.perf_counter() - began
            pieces += [choice["text"] for choice in event["choices"]]
            tokens = event.get("usage", {}).get("completion_tokens", tokens)
    writer.close()
    return Answer(prompt, "".join(pieces), tokens, first_s, time.perf_counter() - began)


async def load(port: int, prompts: list[str], clients: int, seconds: float) -> tuple[list[Answer], float]:
    """Let clients ask one request after the other; return the answers and how long it took."""
    began = time.perf_counter()
    answers: list[Answer] = []

    async def client(number: int) -> None:
        prompt = number
        while time.perf_counter() - began < seconds:
            answers.append(await ask(port, prompt % len(prompts), prompts[prompt % len(prompts)]))
            prompt += clients

    await asyncio.gather(*(client(number) for number in range(clients)))
    return answers, time.perf_counter() - began


def generate_rate(loaded: TextModel, prompts: list[str]) -> float:
    """Return tokens/s of batches of 8 without a server, for about as long as a turn."""
    began, made = time.perf_counter(), 0
    while time.perf_counter() - began < TURN_S:
        rows = [row for prompt in prompts[:BATCH] for row in prompt_rows(loaded, prompt, max_tokens=NEW)]
        made += sum(one.num_tokens for one in complete(loaded, rows, GREEDY, BATCH))
    return made / (time.perf_counter() - began)


def told(answers: list[Answer], took_s: float, expected: list[str]) -> dict[str, Any]:
    """Return what is recorded of a load."""
    firsts = sorted(answer.first_s for answer in answers)
    return {
        "requests": len(answers),
        "cut_short": sum(answer.tokens != NEW for answer in answers),
        "with_another_text": sum(answer.text != expected[answer.prompt] for answer in answers),
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / took_s, 1),
        "first_token_s": {
            "p50": round(statistics.median(firsts), 3),
            "p95": round(firsts[int(0.95 * (len(firsts) - 1))], 3),
        },
        "whole_s_p50": round(statistics.median(answer.whole_s for answer in answers), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    wish = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, SHAPES[wish.shape]["vocab_size"], (PROMPTS, PROMPT), generator=draw)
    prompts = [" ".join(f"w{n}" for n in row) for row in ids.tolist()]
    with tempfile.TemporaryDirectory() as name:
        loaded = make_model(wish.shape, Path(name))
        rows = [prompt_rows(loaded, prompt, max_tokens=NEW)[0] for prompt in prompts]
        expected = [one.text for one in complete(loaded, rows, GREEDY, 1)]
        with serving(Path(name) / "model") as port:
            asyncio.run(load(port, prompts, BATCH, 1.0))  # warm-up
            turns = [
                (generate_rate(loaded, prompts), asyncio.run(load(port, prompts, BATCH, TURN_S)))
                for _ in range(TURNS)
            ]
            many = told(*asyncio.run(load(port, prompts, wish.clients, wish.seconds)), expected)
    rates = [(alone, told(*served, expected)) for alone, served in turns]
    ratio = statistics.median(served["tokens_per_s"] / alone for alone, served in rates)
    figures = {
        "shape": wish.shape,
        "new_tokens": NEW,
        "threads": torch.get_num_threads(),
        f"clients_{BATCH}": {
            "generate_tokens_per_s": [round(alone, 1) for alone, _ in rates],
            "turns": [served for _, served in rates],
            "ratio_to_generate": round(ratio, 3),
            "floor": FLOOR,
        },
        f"clients_{wish.clients}": {"seconds": wish.seconds, **many},
    }
    write_record("serve", figures)
    print(json.dumps(figures, indent=2))
    loads = [many, *(served for _, served in rates)]
    wrong = sum(one["cut_short"] + one["with_another_text"] for one in loads)
    return int(ratio < FLOOR or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
