"""Tokens/s of generation on this CPU beside transformers' `generate` at its own best, with equal weights.

Greedy, 64 tokens after a prompt of 32, with 1 sequence and with 8. transformers runs with its dynamic and its
static cache; the faster counts, round by round. Rounds alternate, in float32, all on the same threads.

    python -m benchmarks.generate [--rounds 5] [--shapes small gpt2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from shoal.infer.generate import GeneratedRow, generate
from shoal.infer.load import load_decoder
from shoal.infer.sampling import Sampling
from shoal.interop.export import export
from shoal.interop.importing import Wanted
from shoal.interop.importing import run as import_checkpoint

SHAPES = {
    "small": {"n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": 256, "vocab_size": 50_257},
    "tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 1_000},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257},
}
PROMPT, NEW = 32, 64
GREEDY = Sampling(temperature=0)


def models_of(shape: str, folder: Path) -> tuple[Any, Any]:
    """Return a random model of transformers, and ours with its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**SHAPES[shape], bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "made")
    import_checkpoint(folder / "made", folder / "ours", Wanted())
    export(folder / "ours", folder / "theirs")
    theirs = GPT2LMHeadModel.from_pretrained(folder / "theirs").eval()
    return theirs, load_decoder(folder / "ours", torch.device("cpu"))[0]


def tokens_per_s(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the rate of generating, and what was."""
    began = time.perf_counter()
    made = work()
    return sum(map(len, made)) / (time.perf_counter() - began), made


def ways_of(theirs: Any, ours: Any, prompts: torch.Tensor) -> dict[str, Callable[[], list[list[int]]]]:
    """Return what generates, by name."""

    def by_shoal() -> list[list[int]]:
        made: list[list[int]] = [[] for _ in prompts]
        for row, token in generate(
            ours, [GeneratedRow(prompt, NEW) for prompt in prompts.tolist()], GREEDY, None
        ):
            made[row].append(token)
        return made

    def by_transformers(cache: str) -> Callable[[], list[list[int]]]:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(prompts)

        def work() -> list[list[int]]:
            made = theirs.generate(prompts, attention_mask=mask, cache_implementation=cache, **options)
            return made[:, prompts.shape[1] :].tolist()

        return work

    return {
        "shoal": by_shoal,
        "transformers dynamic": by_transformers("dynamic"),
        "transformers static": by_transformers("static"),
    }


def compare(shape: str, rounds: int) -> dict[str, Any]:
    """Return tokens/s of each way, with 1 and with 8 sequences."""
    with tempfile.TemporaryDirectory() as name:
        theirs, ours = models_of(shape, Path(name))
    found: dict[str, Any] = {}
    for count in (1, 8):
        generator = torch.Generator().manual_seed(count)
        ways = ways_of(
            theirs, ours, torch.randint(1, SHAPES[shape]["vocab_size"], (count, PROMPT), generator=generator)
        )
        rates: dict[str, list[float]] = {name: [] for name in ways}
        texts = {}
        for number in range(rounds + 1):  # the first one warms up
            for name, work in ways.items():
                rate, texts[name] = tokens_per_s(work)
                if number:
                    rates[name].append(round(rate, 1))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in medians.items() if name != "shoal")
        found[f"{count} sequences"] = {
            "tokens_per_s": medians,
            "ratio_to_transformers_at_its_best": round(medians["shoal"] / best, 2),
            "texts_equal": texts["shoal"] == texts["transformers dynamic"],
            "samples": rates,
        }
        print(shape, count, medians, flush=True)
    one, eight = (found[f"{count} sequences"]["tokens_per_s"]["shoal"] for count in (1, 8))
    return {**found, "eight_beside_one": round(eight / one, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    wish = parser.parse_args()
    figures = {shape: compare(shape, wish.rounds) for shape in wish.shapes}
    write_record(
        "generate", {"prompt": PROMPT, "new_tokens": NEW, "threads": torch.get_num_threads(), **figures}
    )


if __name__ == "__main__":
    main()
