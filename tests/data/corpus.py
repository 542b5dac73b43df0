"""A corpus with planted duplicates, short and broken documents, and passages of an evaluation file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

PASSAGE = " ".join(f"question{n} of the examination" for n in range(12))
STAGES = """
[repair]

[length]
tokenizer = "estimate"
min_tokens = 40

[dedup]
paragraphs = true

[decontaminate]
files = ["evaluation.txt"]
max_count = 1000
"""


def texts(number: int, seed: int = 3) -> Iterator[tuple[str, str]]:
    """Yield (text, what it is): fresh, short, equal, near, contaminated."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randrange(2, 9))) for _ in range(3000)]
    made: list[str] = []
    for n in range(number):
        kind = draw.choice(["fresh"] * 6 + ["equal", "near", "short", "contaminated"]) if n > 5 else "fresh"
        text = " ".join(draw.choices(words, k=150))
        if kind == "equal":
            text = draw.choice(made)
        elif kind == "near":
            text = draw.choice(made) + " " + " ".join(draw.choices(words, k=3))
        elif kind == "short":
            text = " ".join(draw.choices(words, k=5))
        elif kind == "contaminated":
            sentences = [" ".join(text.split()[n : n + 10]) for n in range(0, 150, 10)]
            text = f"{'. '.join(sentences)}. {PASSAGE} {' '.join(draw.choices(words, k=20))}"
        if kind == "fresh":
            made.append(text)
        yield text, kind


def write(folder: Path, number: int = 400) -> Path:
    """Write JSON lines, with a broken one now and then, a TOML of stages and its evaluation file."""
    folder.mkdir(exist_ok=True)
    with (folder / "a.jsonl").open("w") as file:
        for n, (text, _) in enumerate(texts(number)):
            file.write(json.dumps({"text": text, "url": f"https://example.com/{n}"}) + "\n")
            if n % 150 == 0:
                file.write("broken\n")
    (folder / "evaluation.txt").write_text(PASSAGE)
    stages = STAGES.replace("evaluation.txt", str(folder / "evaluation.txt"))
    (folder / "stages.toml").write_text(stages)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return all files but the times that steps took."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "times.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
