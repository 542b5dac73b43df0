"""From text to text: one prompt as a stream, many prompts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.data.tokenizer import Tokenizer
from shoal.infer.generate import GeneratedRow, tokens_that_fit
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling

_CONTEXT = 16  # tokens; more than a character is cut into


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt; `finish` is "eod" (end of document), "length" or "stop" (a stop text)."""

    text: str
    num_tokens: int
    finish: str


def prompt_rows(
    loaded: TextModel,
    prompt: str,
    *,
    number: int = 0,
    samples: int = 1,
    max_tokens: int | None = None,
    strict: bool = False,
) -> list[GeneratedRow]:
    """Return a row for each sample of a prompt; `number` is the prompt's, for the seed.

    An empty prompt stands for the start of a document, which follows the end of another. `strict`: an
    InputError rejects what does not fit the model's positions.
    """
    tokens = loaded.tokenizer.encode(prompt) or [loaded.eod_id]
    fit = tokens_that_fit(loaded.model.shape, len(tokens), max_tokens, strict=strict)
    return [GeneratedRow(tokens, fit, prompt=number, sample=sample) for sample in range(samples)]


class Writer:
    """Turns tokens that follow a prompt into text as they come, in whole characters, up to a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._text = tokenizer.stream()
        for token in prompt[-_CONTEXT:]:  # a text's first token may be written differently
            self._text.push(token)
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # may be the begin of a stop text
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain by now."""
        return self._pass(self._text.push(token))

    def end(self) -> str:
        """Return the rest; what the limit cut in half is left out."""
        passed = self._pass(self._text.flush().rstrip("\ufffd"))
        rest, self._held = self._held, ""
        return passed + rest

    def _pass(self, piece: str) -> str:
        if not self._stops or self.stopped:
            return "" if self.stopped else piece
        text, self._held = self._held + piece, ""
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        longest = max(len(stop) for stop in self._stops) - 1
        for begin in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stops):
                self._held = text[begin:]
                return text[:begin]
        return text


def stream(loaded: TextModel, row: GeneratedRow, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation of one row in pieces of whole characters, as it is made."""
    writer = Writer(loaded.tokenizer, row.tokens)
    for _, token in loaded.generate([row], sampling):
        yield writer.push(token)
    yield writer.end()


def complete(
    loaded: TextModel,
    rows: Sequence[GeneratedRow],
    sampling: Sampling,
    batch_size: int,
    stops: Sequence[Sequence[str]] = (),
) -> Iterator[Completion]:
    """Yield the continuation of each row in order, computed in batches of at most `batch_size`.

    `stops` has the texts before which each row ends.
    """
    stops = stops or [()] * len(rows)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens: list[list[int]] = [[] for _ in batch]
        for row, token in loaded.generate(batch, sampling):
            tokens[row].append(token)
        own = stops[first : first + batch_size]
        yield from (_completion(loaded, *one) for one in zip(batch, tokens, own, strict=True))


def _completion(loaded: TextModel, row: GeneratedRow, tokens: list[int], stops: Sequence[str]) -> Completion:
    writer = Writer(loaded.tokenizer, row.tokens, stops)
    text = "".join(writer.push(token) for token in tokens) + writer.end()
    finish = "length" if len(tokens) == row.max_tokens else "eod"
    return Completion(text, len(tokens), "stop" if writer.stopped else finish)
