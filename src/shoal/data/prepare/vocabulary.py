"""Find or train the tokenizer of a dataset; the answer is always the bytes of one file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.data.boundaries import AFTER_WORD
from shoal.data.bytelevel import BYTE_OF, merges_of, to_chars
from shoal.data.permutation import permute
from shoal.data.prepare.options import BYTES, CHAR, FROM_TEXT, GPT2, TRAINED, WORD, PrepareOptions
from shoal.data.prepare.parse import Format, parse_range
from shoal.data.prepare.plan import limit_ranges, plan_ranges
from shoal.data.prepare.sources import SourceFile, WorkRange
from shoal.data.tokenizer import (
    EOD_NAMES,
    UNKNOWN,
    byte_level_json,
    bytes_tokenizer_json,
    closed_json,
    parse_tokenizer,
    read_tokenizer,
)
from shoal.errors import DataError, InputError

SAMPLE_BYTES = 32 << 20  # of text: enough for 32,000 merges, and it bounds time and memory
# With so much text for each id, 95 % of what a BPE learns occurs about 100 times or more: enough, by Gowda
# and May, Finding the Optimal Vocabulary Size, 2020. On 1, 3 and 12 MB of text: 470, 92 and 113 times.
BYTES_PER_ID = 3000
MIN_DEFAULT, MAX_DEFAULT = 512, 32_768
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
            f"--tokenizer {choice} is neither a file nor one of {', '.join(FROM_TEXT)}, {GPT2}, {BYTES}",
            hint="a FILE is a tokenizer.json, a SentencePiece .model, or a folder with one",
        )
    return read_tokenizer(path)


class Corpus(Protocol):
    """The text that a tokenizer is made of."""

    def sample(self, budget: int) -> Iterator[list[str]]:
        """Yield batches of main text, about `budget` bytes in all; the same for any cut into ranges."""

    def num_bytes(self) -> int:
        """Return the size of the main text, exactly where it is smaller than a sample."""


def make_vocabulary(
    options: PrepareOptions, corpus: Corpus, say: Callable[[str], None]
) -> tuple[bytes, dict[str, int]]:
    """Make a tokenizer's file of the main text: a byte-level BPE, its most frequent words, or its characters.

    BPE and words come from a bounded sample, characters from all of the text; the same input gives the same
    file. Also returned: for how many bytes of text a BPE's size was chosen, where --vocab-size is left out.
    """
    if options.tokenizer == CHAR:
        say("collecting the characters of the text")
        characters = set[str]()
        for texts in corpus.sample(sys.maxsize):
            characters.update(*texts)
        return closed_json(sorted(characters), words=False).encode(), {}
    if options.tokenizer == WORD:
        say("counting the words of the text")
        return _train_words(corpus.sample(SAMPLE_BYTES), options.vocab_size or MAX_DEFAULT), {}
    vocab_size, chosen_for = options.vocab_size, dict[str, int]()
    reason = ""
    if vocab_size is None:
        size = corpus.num_bytes()
        vocab_size, chosen_for = default_vocab(size), {"vocab_size_chosen_for_bytes": size}
        reason = f", chosen for {size / 1e6:,.1f} MB of text (--vocab-size sets another number)"
    say(f"training a byte-level BPE with {vocab_size:,} ids{reason}")
    content = _train_bpe(corpus.sample(SAMPLE_BYTES), vocab_size)
    found = parse_tokenizer(content, options.tokenizer).vocab_size
    if found < vocab_size:
        say(f"the text gives only {found:,} ids: fewer than {vocab_size:,}")
    return content, chosen_for


def default_vocab(text_bytes: int) -> int:
    """Return the size of a BPE's vocabulary that suits so much text, a power of two."""
    fitting = 1 << (text_bytes // BYTES_PER_ID).bit_length() >> 1
    return min(max(fitting, MIN_DEFAULT), MAX_DEFAULT)


def _train_words(texts: Iterator[list[str]], vocab_size: int) -> bytes:
    """Return the tokenizer of the most frequent words.

    A word that occurs once is left out, to teach what `<unk>` is; a text that has its own keeps all.
    """
    counts = Counter(word for batch in texts for text in batch for word in text.split())
    least = 1 if UNKNOWN in counts else 2
    words = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
    tokens = [word for word in words if word not in (UNKNOWN, EOD_NAMES[0])]
    return closed_json(tokens[: vocab_size - 2], words=True).encode()


def _train_bpe(texts: Iterator[list[str]], vocab_size: int) -> bytes:
    """Train a byte-level BPE."""
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
    built.train_from_iterator(texts, trainer)
    model = json.loads(built.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    return byte_level_json(model["vocab"], merges, EOD_NAMES[0]).encode()


@dataclass(frozen=True)
class SourceText:
    """The main text as it is in the files."""

    sources: list[SourceFile]
    form: Format
    seed: int
    limit: int | None

    def num_bytes(self) -> int:
        """Measure a text that is no larger than a sample; take a larger one to have its files' size."""
        size = sum(len(text.encode()) for batch in self.sample(SAMPLE_BYTES) for text in batch)
        whole = size < SAMPLE_BYTES or self.limit is not None
        main = (source.size for source in self.sources if source.role == "main")
        return size if whole else max(size, sum(main))

    def sample(self, budget: int) -> Iterator[list[str]]:
        """Yield texts from places spread over the files by the seed: ranges of a fixed size."""
        form = Format(self.form.text_key, self.form.delim, self.form.separator, AFTER_WORD)
        main = [source for source in self.sources if source.role == "main"]
        files = dict(enumerate(main))
        ranges = plan_ranges(main, SAMPLE_RANGE, separator=form.separator, cuttable=True)
        if self.limit is not None:
            ranges = limit_ranges(ranges, files, form, self.limit)
        order = np.argsort(permute(np.arange(len(ranges), dtype=np.int64), len(ranges), self.seed, "sample"))
        share = max(SAMPLE_RANGE, budget // max(1, len(ranges)))
        taken = 0
        for number in order:
            for texts, size in _texts_up_to(ranges[number], files, form, share):
                taken += size
                yield texts
            if taken >= budget:
                return


def check_fit(content: bytes, where: str, texts: list[str], say: Callable[[str], None]) -> None:
    """Raise DataError where a tokenizer loses more of a sample of the text than it may.

    Of one that was made of this text's words, tell how much that is.
    """
    lost = _lost_share(content, where, texts)
    if where == WORD:
        say(f"{lost:.1%} of a sample of the text is in words outside the vocabulary: {UNKNOWN}")
    elif lost > MAX_LOST_SHARE:
        raise DataError(
            f"tokenizer {where} does not fit this text: {lost:.0%} of it is lost",
            hint=f"choose one made for this language, or --tokenizer {TRAINED}, {WORD} or {BYTES}",
        )


def _lost_share(content: bytes, where: str, texts: list[str]) -> float:
    """Return the share of the characters that decoding does not bring back; unknown words are lost.

    An unknown token that stands in the text itself, as in the Penn Treebank, is none of its characters.
    """
    tokenizer = parse_tokenizer(content, where)
    unknown = json.loads(content)["model"].get("unk_token") if content.lstrip()[:1] == b"{" else None
    before = after = 0
    for text in texts:
        decoded = tokenizer.decode(tokenizer.encode(text))
        had, has = (_visible(one.replace(unknown, "") if unknown else one) for one in (text, decoded))
        before, after = before + had, after + min(had, has)
    return 1 - after / before if before else 0.0


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
