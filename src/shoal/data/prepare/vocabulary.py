"""Find or train the tokenizer of a dataset; the answer is always the bytes of one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from shoal.data.boundaries import AFTER_WORD
from shoal.data.bytelevel import BYTE_OF, merges_of, to_chars
from shoal.data.permutation import permute
from shoal.data.prepare.options import BYTES, GPT2, TRAINED
from shoal.data.prepare.parse import Format, parse_range
from shoal.data.prepare.plan import limit_ranges, plan_ranges
from shoal.data.prepare.sources import SourceFile, WorkRange
from shoal.data.tokenizer import (
    EOD_NAMES,
    byte_level_json,
    bytes_tokenizer_json,
    parse_tokenizer,
    read_tokenizer,
)
from shoal.errors import DataError, InputError

SAMPLE_BYTES = 32 << 20  # of text: enough for 32,000 merges, and it bounds time and memory
SAMPLE_RANGE = 1 << 20
FIT_BYTES = 1 << 18
MAX_LOST_SHARE = 0.05


def fixed_tokenizer(choice: str) -> bytes:
    """Return the file of a tokenizer that needs no training: gpt2, bytes, a file or a folder."""
    if choice == BYTES:
        return bytes_tokenizer_json().encode()
    if choice == GPT2 and not Path(choice).exists():
        return _downloaded_gpt2().encode()
    path = Path(choice)
    if not path.exists():
        raise InputError(
            f"--tokenizer {choice} is neither a file nor one of {TRAINED}, {GPT2}, {BYTES}",
            hint="a FILE is a tokenizer.json, a SentencePiece .model, or a folder with one",
        )
    return read_tokenizer(path)


def train_bpe(
    sources: list[SourceFile], form: Format, vocab_size: int, seed: int, limit: int | None
) -> bytes:
    """Train a byte-level BPE on a bounded sample of the main text; the same input gives the same file."""
    from tokenizers import Tokenizer as Reference
    from tokenizers import models, pre_tokenizers, trainers

    built = Reference(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # the end-of-document token comes last, as in GPT-2
        min_frequency=2,
        initial_alphabet=sorted(BYTE_OF),
        show_progress=False,
    )
    built.train_from_iterator(sample_text(sources, form, seed, limit), trainer)
    model = json.loads(built.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    return byte_level_json(model["vocab"], merges, EOD_NAMES[0]).encode()


def sample_text(
    sources: list[SourceFile], form: Format, seed: int, limit: int | None, budget: int = SAMPLE_BYTES
) -> Iterator[list[str]]:
    """Yield batches of main text, about `budget` bytes in all, from places spread over the corpus by `seed`.

    The places are ranges of fixed size, whatever size the work is cut into.
    """
    form = Format(form.text_key, form.delim, form.separator, AFTER_WORD)
    main = [source for source in sources if source.role == "main"]
    files = dict(enumerate(main))
    ranges = plan_ranges(main, SAMPLE_RANGE, separator=form.separator, cuttable=True)
    if limit is not None:
        ranges = limit_ranges(ranges, files, form, limit)
    order = np.argsort(permute(np.arange(len(ranges), dtype=np.int64), len(ranges), seed, "sample"))
    share = max(SAMPLE_RANGE, budget // max(1, len(ranges)))
    taken = 0
    for number in order:
        for texts, size in _texts_up_to(ranges[number], files, form, share):
            taken += size
            yield texts
        if taken >= budget:
            return


def check_fit(content: bytes, where: str, texts: list[str]) -> None:
    """Raise DataError where a tokenizer loses text: what it decodes must be as long as what it encoded."""
    tokenizer = parse_tokenizer(content, where)
    before = after = 0
    for text in texts:
        before += _visible(text)
        after += min(_visible(text), _visible(tokenizer.decode(tokenizer.encode(text))))
    if before and 1 - after / before > MAX_LOST_SHARE:
        raise DataError(
            f"tokenizer {where} does not fit this text: {1 - after / before:.0%} of it is lost",
            hint=f"choose one made for this language, or --tokenizer {TRAINED}, or --tokenizer {BYTES}",
        )


def _texts_up_to(
    work: WorkRange, sources: Mapping[int, SourceFile], form: Format, limit: int
) -> Iterator[tuple[list[str], int]]:
    """Yield (texts, bytes) of a range until `limit` bytes."""
    taken = 0
    for batch in parse_range(work, sources, form):
        texts = [text for text in batch.column("text").to_pylist() if text]
        size = sum(len(text.encode()) for text in texts)
        taken += size
        if texts:
            yield texts, size
        if taken >= limit:
            return


def _visible(text: str) -> int:
    """Count the characters that are not white space."""
    return sum(map(len, text.split()))


def _downloaded_gpt2() -> str:
    """Build GPT-2's tokenizer from tiktoken's cache, or its download."""
    from tiktoken_ext.openai_public import gpt2

    try:
        ranks = gpt2()["mergeable_ranks"]
    except Exception as error:
        raise InputError(
            f"GPT-2's vocabulary is not in tiktoken's cache and cannot be downloaded: {type(error).__name__}",
            hint="name a folder with its vocab.json and merges.txt: --tokenizer FOLDER",
        ) from error
    vocab = {to_chars(token): rank for token, rank in ranks.items()} | {EOD_NAMES[0]: len(ranks)}
    merges = [(to_chars(left), to_chars(right)) for left, right in merges_of(ranks)]
    return byte_level_json(vocab, merges, EOD_NAMES[0])
