"""Text to ids and back: `tokenizer.json` files, SentencePiece models, bytes, characters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.data.boundaries import ANYWHERE, Boundary, sentencepiece_boundary
from shoal.data.bytelevel import BYTE_OF, boundary_rule, byte_level_merges, tiktoken_ranks, to_chars
from shoal.data.growth import refuse_growth
from shoal.errors import DataError

MAX_FILE_BYTES = 256 << 20  # the largest published tokenizer.json has some 40 MB
MAX_VOCAB = 1 << 24
_KINDS = "use a tokenizer.json, a SentencePiece .model, or the folder that holds vocab.json and merges.txt"
PIECE_BYTES = 1 << 20  # longer texts are encoded piece by piece
_WORTH_PROVING = 1 << 15  # characters; below, the slower library is done before tiktoken is set up
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
UNKNOWN = "<unk>"
JSON_NAME, MODEL_NAME = "tokenizer.json", "tokenizer.model"
GPT2_PAT = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # the same, faster
)


class Backend(Protocol):
    """What differs between kinds of tokenizers; `cut` finds where a text may be cut (None: nowhere known)."""

    name: str
    vocab_size: int
    eod_id: int
    cut: Boundary | None

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts of moderate size."""

    def ids_with_specials(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts in which the text of a special token becomes its id."""

    def text(self, ids: list[int]) -> str:
        """Decode ids, leaving special tokens out."""


class Tokenizer:
    """Encode and decode text. The text of a special token is only text, but for `encode_with_specials`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.vocab_size = backend.vocab_size
        self.eod_id = backend.eod_id
        self.cut = backend.cut  # where a long text may be cut; None: nowhere that is known

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-document id."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Return the ids of a text in which the text of a special token becomes its id, as in chat templates.

        A SentencePiece model has special tokens that no text becomes.
        """
        ids: list[int] = self._ids([text], self._backend.ids_with_specials)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return 1-D uint32 ids for each text. A long text is cut where its ids cannot change."""
        if all(len(text) <= PIECE_BYTES // 4 for text in texts):
            return self._ids(texts)
        out = []
        for text in texts:
            parts = [self._ids([piece])[0] for piece in self._pieces(text)]
            out.append(np.concatenate(parts))
        return out

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens leave no trace, broken UTF-8 becomes U+FFFD."""
        return self._backend.text([int(i) for i in ids])

    def stream(self) -> TextStream:
        """Return a decoder for ids that come one by one."""
        return TextStream(self)

    def _ids(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str]], list[np.ndarray]] | None = None,
    ) -> list[np.ndarray]:
        """Encode, turning a lone surrogate into a sentence."""
        try:
            return (encode or self._backend.ids)(texts)
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text is not valid Unicode: {error.reason}", hint="remove lone surrogates"
            ) from error

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a long text into pieces of about PIECE_BYTES."""
        data, start = text.encode(errors="surrogatepass"), 0
        while self.cut and (end := self.cut.find(data, start + PIECE_BYTES)) is not None:
            yield data[start:end].decode(errors="surrogatepass")
            start = end + self.cut.skip
        yield data[start:].decode(errors="surrogatepass")


class TextStream:
    """Decode ids as they come; nothing is returned until its last character is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # ids whose text was returned; they stay as context, for joints between tokens

    def push(self, token_id: int) -> str:
        """Add one id; return the text that became certain, often none."""
        self._ids.append(int(token_id))
        fresh = self._fresh()
        if not fresh or fresh.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return fresh

    def flush(self) -> str:
        """Return what is left; half a character becomes U+FFFD."""
        fresh = self._fresh()
        self._ids, self._known = [], 0
        return fresh

    def _fresh(self) -> str:
        """Return the text of the ids beyond those already returned."""
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._known])) :]


class JsonBackend:
    """A `tokenizer.json`, read by the tokenizers library; bytes, characters and GPT-2-style BPE go faster."""

    def __init__(self, content: str, where: str) -> None:
        from tokenizers import Tokenizer as Reference

        spec = _parse_json(content, where)
        refuse_growth(spec, where)
        with _said(f"tokenizer {where} cannot be loaded"):
            self.reference: Any = Reference.from_str(content)
        self.reference.no_truncation()
        self.reference.post_processor = None  # adds special tokens, or a text again and again
        self.reference.no_padding()
        if getattr(self.reference.model, "dropout", None):
            self.reference.model.dropout = None  # the same text must have the same ids
        self.reference.encode_special_tokens = True
        vocab = self.reference.get_vocab(with_added_tokens=True)
        self.vocab_size = _checked_size(max(vocab.values(), default=-1) + 1, where)
        self.eod_id = next((vocab[name] for name in EOD_NAMES if name in vocab), -1)
        if self.eod_id < 0:
            raise DataError(
                f"tokenizer {where} has no end-of-document token",
                hint=f"add one of these as a special token: {', '.join(EOD_NAMES)}",
            )
        self._spec, self._where = spec, where
        self._is_bytes = _is_bytes(spec)
        self._char_ids = _char_ids(spec)
        anywhere = self._is_bytes or self._char_ids is not None
        self.cut = ANYWHERE if anywhere else boundary_rule(spec)
        self.name = (
            "bytes" if self._is_bytes else "characters" if anywhere else str(spec["model"].get("type"))
        )

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode by the fastest way that is proven to give the reference's ids."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        if self._char_ids is not None:
            return [self._char_ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)] for text in texts]
        worth_it = "_fast" in self.__dict__ or sum(map(len, texts)) > _WORTH_PROVING
        if worth_it and self._fast is not None:
            encoder, table = self._fast
            return [table[encoder.encode_to_numpy(text, disallowed_special=())] for text in texts]
        return self._ids_by(self.reference, texts)

    def ids_with_specials(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts in which the text of a special token becomes its id."""
        return self._ids_by(self._with_specials, texts)

    def _ids_by(self, reference: Any, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            text.encode()  # a lone surrogate must raise here, not inside the library
        with _said(f"tokenizer {self._where} cannot encode this text"):
            found = reference.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in found]

    @cached_property
    def _with_specials(self) -> Any:
        return type(self.reference).from_str(self.reference.to_str())

    def text(self, ids: list[int]) -> str:
        """Decode ids, leaving special tokens out."""
        with _said(f"tokenizer {self._where} cannot decode these ids"):
            return str(self.reference.decode(ids, skip_special_tokens=True))

    @cached_property
    def _fast(self) -> tuple[Any, np.ndarray] | None:
        """Build tiktoken's core and the table from its ranks to ids; None where equal ids are not proven."""
        merges = byte_level_merges(self._spec)
        ranks = tiktoken_ranks(merges) if merges else None
        if ranks is None:
            return None
        import tiktoken

        vocab = self._spec["model"]["vocab"]
        try:
            table = np.array([vocab[to_chars(token)] for token in ranks], dtype=np.uint32)
        except KeyError:
            return None
        encoding = tiktoken.Encoding("shoal", pat_str=GPT2_PAT, mergeable_ranks=ranks, special_tokens={})
        return encoding, table


class SentencePieceBackend:
    """A SentencePiece `.model`, read by its own library."""

    def __init__(self, content: bytes, where: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise DataError(
                "a SentencePiece model needs its library", hint="pip install sentencepiece"
            ) from error
        with _said(f"tokenizer {where} is neither a tokenizer.json nor a SentencePiece model"):
            self.processor: Any = SentencePieceProcessor(model_proto=content)
        self.vocab_size = _checked_size(self.processor.vocab_size(), where)
        self.eod_id = self.processor.eos_id()
        if self.eod_id < 0:
            raise DataError(
                f"tokenizer {where} has no </s>, which ends a document", hint="train it with eos_id set"
            )
        self.name = "SentencePiece"
        pieces = map(self.processor.id_to_piece, range(self.vocab_size))
        self.cut = sentencepiece_boundary(content, pieces)

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts one after the other."""
        for text in texts:
            text.encode()
        found = self.processor.encode(list(texts), num_threads=1)
        return [np.array(ids, dtype=np.uint32) for ids in found]

    ids_with_specials = ids

    def text(self, ids: list[int]) -> str:
        """Decode ids, leaving control tokens out."""
        return str(self.processor.decode(ids))


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Turn whatever a library raises into a DataError; its panics, too, which are no Exceptions."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what}: {str(error)[:200]}", hint=_KINDS) from error
        raise


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json` or SentencePiece `.model`, or the one in folder `path`."""
    return parse_tokenizer(read_tokenizer(Path(path)), str(path))


def read_tokenizer(path: Path) -> bytes:
    """Read a tokenizer's file, or a folder's: `tokenizer.json`, `tokenizer.model`, or GPT-2's two files."""
    if not path.is_dir():
        return read_tokenizer_file(path)
    for name in (JSON_NAME, MODEL_NAME):
        if (path / name).is_file():
            return read_tokenizer_file(path / name)
    if not ((path / "vocab.json").is_file() and (path / "merges.txt").is_file()):
        raise DataError(
            f"folder {path} holds no tokenizer",
            hint=f"it needs {JSON_NAME}, {MODEL_NAME}, or vocab.json and merges.txt",
        )
    contents = [read_tokenizer_file(path / name) for name in ("vocab.json", "merges.txt")]
    with _said(f"vocab.json and merges.txt in {path} do not fit together"):
        vocab = json.loads(contents[0])
        _checked_size(max(vocab.values(), default=-1) + 1, str(path))  # the library walks through all ids
        lines = contents[1].decode().splitlines()
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        return byte_level_json(vocab, [(left, right) for left, right in pairs], EOD_NAMES[0]).encode()


def read_tokenizer_file(path: Path) -> bytes:
    """Read a tokenizer's file, of bounded size."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"tokenizer {path} is larger than {MAX_FILE_BYTES >> 20} MiB: not a tokenizer")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error


def parse_tokenizer(content: bytes, where: str) -> Tokenizer:
    """Build a tokenizer from the bytes of its file; `where` names it in errors."""
    if content.lstrip()[:1] != b"{":
        return Tokenizer(SentencePieceBackend(content, where))
    try:
        return Tokenizer(JsonBackend(content.decode(), where))
    except UnicodeDecodeError as error:
        raise DataError(f"tokenizer {where} is not UTF-8: {error.reason} at byte {error.start}") from error


def bytes_tokenizer_json() -> str:
    """Return the `tokenizer.json` in which each byte is its own id and 256 ends a document."""
    return byte_level_json(dict(BYTE_OF), [], EOD_NAMES[0])


def closed_json(tokens: Iterable[str], *, words: bool) -> str:
    """Return the `tokenizer.json` whose tokens are these words, split at white space, or characters.

    `<unk>`, id 0, stands for any other. Decoding joins words with blanks.
    """
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate([UNKNOWN, *tokens])}
    if not words:
        return _built_json(models.BPE(vocab, [], unk_token=UNKNOWN), None, decoders.Fuse(), EOD_NAMES[0])
    return _built_json(
        models.WordLevel(vocab, unk_token=UNKNOWN), pre_tokenizers.WhitespaceSplit(), None, EOD_NAMES[0]
    )


def byte_level_json(vocab: dict[str, int], merges: list[tuple[str, str]], eod: str) -> str:
    """Return the `tokenizer.json` of a GPT-2-style BPE with `eod` as its special token."""
    from tokenizers import decoders, models, pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _built_json(models.BPE(vocab=vocab, merges=merges), split, decoders.ByteLevel(), eod)


def _built_json(model: Any, pre_tokenizer: Any, decoder: Any, eod: str) -> str:
    """Put a tokenizer of the library together, with `eod` as its special token, and return its file."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Reference

    built = Reference(model)
    if pre_tokenizer is not None:
        built.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        built.decoder = decoder
    built.add_special_tokens([AddedToken(eod, special=True, normalized=False)])
    return str(built.to_str(pretty=False))


def _parse_json(content: str, where: str) -> dict[str, Any]:
    """Read the structure of a tokenizer.json far enough to reason about it."""
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer {where} is not valid JSON: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise DataError(f"tokenizer {where} is not a tokenizer.json: it has no model", hint=_KINDS)
    return spec


def _is_bytes(spec: dict[str, Any]) -> bool:
    """Tell whether every byte is its own id and nothing is merged."""
    return byte_level_merges(spec) == [] and all(
        spec["model"]["vocab"][char] == BYTE_OF[char] for char in BYTE_OF
    )


def _char_ids(spec: dict[str, Any]) -> np.ndarray | None:
    """Return the id of each code point where every character is a token of its own; None elsewhere.

    A BPE that merges nothing and splits nothing looks each character up by itself.
    """
    model = dict(spec["model"])
    vocab, unknown = model.pop("vocab", None), model.pop("unk_token", None)
    plain = (
        model.pop("type", None) == "BPE"
        and isinstance(vocab, dict)
        and isinstance(vocab.get(unknown), int)
        and not any(model.values())  # merges, affixes, fused unknowns and the like
        and not any(spec.get(part) for part in ("normalizer", "pre_tokenizer"))
        and all(token.get("special") for token in spec.get("added_tokens") or [])
    )
    if not plain:
        return None
    table = np.full(sys.maxunicode + 1, vocab[unknown], dtype=np.uint32)
    for token, number in vocab.items():
        if len(token) == 1:
            table[ord(token)] = number
    return table


def _checked_size(vocab_size: int, where: str) -> int:
    """Refuse a vocabulary that no model can have."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise DataError(f"tokenizer {where} has {vocab_size:,} ids; allowed are 1 to {MAX_VOCAB:,}")
    return vocab_size
