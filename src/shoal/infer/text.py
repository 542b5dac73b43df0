"""From text to text: one prompt as a stream, many prompts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.data.tokenizer import TextStream
from shoal.infer.generate import Row, tokens_that_fit
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt; `finish` is "eod" (end of document) or "length"."""

    text: str
    num_tokens: int
    finish: str


def prompt_rows(
    loaded: TextModel, prompt: str, *, number: int = 0, samples: int = 1, max_tokens: int | None = None
) -> list[Row]:
    """Return a row for each sample of a prompt; `number` is the prompt's, for the seed.

    An empty prompt stands for the start of a document, which follows the end of another. An InputError
    refuses what does not fit the model's positions.
    """
    tokens = loaded.tokenizer.encode(prompt) or [loaded.eod_id]
    fit = tokens_that_fit(loaded.model.shape, len(tokens), max_tokens)
    return [Row(tokens, fit, prompt=number, sample=sample) for sample in range(samples)]


def stream(loaded: TextModel, row: Row, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation of one row in pieces of whole characters, as it is made."""
    text = _text_after(loaded, row)
    for _, token in loaded.generate([row], sampling):
        yield text.push(token)
    yield _rest(text)


def complete(
    loaded: TextModel, rows: Sequence[Row], sampling: Sampling, batch_size: int
) -> Iterator[Completion]:
    """Yield the continuation of each row in order, computed in batches of at most `batch_size`."""
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens: list[list[int]] = [[] for _ in batch]
        for row, token in loaded.generate(batch, sampling):
            tokens[row].append(token)
        yield from (_completion(loaded, row, got) for row, got in zip(batch, tokens, strict=True))


def _completion(loaded: TextModel, row: Row, tokens: list[int]) -> Completion:
    text = _text_after(loaded, row)
    pieces = [text.push(token) for token in tokens]
    finish = "length" if len(tokens) == row.max_tokens else "eod"
    return Completion("".join(pieces) + _rest(text), len(tokens), finish)


def _text_after(loaded: TextModel, row: Row) -> TextStream:
    """Return a decoder that has seen the prompt: a text's first token may be written differently."""
    text = loaded.tokenizer.stream()
    for token in row.tokens:
        text.push(token)
    return text


def _rest(text: TextStream) -> str:
    """Return the last whole characters; what the limit cut in half is left out."""
    return text.flush().rstrip("\ufffd")
