"""Drop texts that are not prose of some quality, by the rules of Gopher and C4."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.data.prepare.stages.documents import (
    Reason,
    Stage,
    StageSettings,
    dropped,
    facts_of,
    with_columns,
    with_meta,
)
from shoal.data.prepare.stages.repetition import TOP_SIZES, character_units, too_repetitive, word_units
from shoal.data.prepare.stages.scripts import IDEOGRAPHS, SYLLABIC, UNSPACED_SHARE, pattern
from shoal.data.prepare.stages.source_code import Kind, is_source_code

Share = Annotated[float, Field(ge=0.0, le=1.0)]
MEASURED_CHARS = 4_000_000  # of a document; what follows is not looked at
_IDEOGRAPHS, _SYLLABIC = (re.compile(pattern(ranges)) for ranges in (IDEOGRAPHS, SYLLABIC))
_HANGUL = re.compile("[\uac00-\ud7a3]")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORDS_WITH_LETTERS = re.compile(r"[^\W\d_]\S*")
_BULLETS = tuple("•‣◦▪▸●○■-*·")
_ELLIPSES = ("...", "…")
_ASKS = re.compile(r"\b(?:enabl|disabl|activat|requir|support|browser|turn(?:ed)? o)")
_POLICY = re.compile("terms of use|privacy policy|cookie policy|uses? cookies|use of cookies")
_FUNCTION_WORDS = {  # those of English are Gopher's
    "en": "the be to of and that have with",
    "de": "der die das und ist nicht ein mit von zu den auf",
    "fr": "le la les de et est que un une dans pour des",
    "es": "el la los de y que en un una es por con",
    "it": "il la di e che un una per non con sono del",
    "pt": "o a os de e que um uma para com não em",
    "nl": "de het een en van is dat niet op met te in",
    "sv": "och att det som en är på av för med den inte",
    "da": "og at det som en er på af for med den ikke",
    "no": "og at det som en er på av for med den ikke",
    "pl": "i w na z się nie że do to jest o jak",
    "ru": "и в не на что с как это по но из к",
    "id": "yang dan di dari untuk dengan ini itu adalah pada ke dalam",
}


class Quality(StageSettings):
    """Quality rules of Gopher (Rae and others, Scaling Language Models, 2021, appendix A.1.1, table A1), C4
    (Raffel and others, Exploring the Limits of Transfer Learning, 2020, section 2.2).

    A minimum of 0, or a maximum share of 1, switches a rule off. Source code is not judged. Rules about words
    do not apply to text in scripts that write no spaces between words; its n-grams are of characters.
    """

    name = "quality"
    min_words: NonNegativeInt = 50
    """Minimum number of words (Gopher)."""
    max_words: PositiveInt = 100_000
    """Maximum number of words (Gopher)."""
    min_mean_word_chars: float = Field(default=3.0, ge=0.0)
    """Minimum mean length of a word, in characters; a Korean syllable counts as two (Gopher)."""
    max_mean_word_chars: PositiveFloat = 10.0
    """Maximum mean length of a word, in characters; a Korean syllable counts as two (Gopher)."""
    max_symbols_per_word: Share = 0.1
    """Maximum number of # signs, and of ellipses, for each word (Gopher)."""
    max_bullet_lines: Share = 0.9
    """Maximum share of lines that begin with a bullet or hyphen (Gopher)."""
    max_ellipsis_lines: Share = 0.3
    """Maximum share of lines that end in an ellipsis (Gopher)."""
    min_words_with_letters: Share = 0.8
    """Minimum share of words that have a letter (Gopher)."""
    min_function_words: NonNegativeInt = 2
    """Minimum number of different function words, such as `the` or `with`, if the stage language found a
    language whose function words are known (Gopher)."""
    max_duplicate_lines: Share = 0.3
    """Maximum share of lines that occurred before (Gopher)."""
    max_duplicate_line_chars: Share = 0.2
    """Maximum share of characters in lines that occurred before (Gopher)."""
    max_duplicate_paragraphs: Share = 0.3
    """Maximum share of paragraphs that occurred before (Gopher)."""
    max_duplicate_paragraph_chars: Share = 0.2
    """Maximum share of characters in paragraphs that occurred before (Gopher)."""
    max_top_ngrams: tuple[Share, Share, Share] = (0.2, 0.18, 0.16)
    """Maximum share of characters in the most frequent n-gram, for n of 2, 3 and 4 (Gopher)."""
    max_duplicate_ngrams: tuple[Share, Share, Share, Share, Share, Share] = (
        0.15,
        0.14,
        0.13,
        0.12,
        0.11,
        0.1,
    )
    """Maximum share of characters in n-grams that occurred before, for n of 5 to 10 (Gopher)."""
    lorem_ipsum: bool = True
    """Drop documents that contain `lorem ipsum` (C4)."""
    curly_brackets: bool = False
    """Drop documents that contain a curly bracket (C4)."""
    javascript_line_words: NonNegativeInt = 30
    """Remove lines of up to this number of words that ask for JavaScript (after C4, which removes all lines
    with the word)."""
    policy_line_words: NonNegativeInt = 30
    """Remove lines of up to this number of words about terms of use, a privacy policy or the use of cookies
    (after C4)."""
    kind: Kind = "auto"
    """What the documents are: text, code, or auto, which recognises source code by the shape of its lines."""

    def start(self) -> Stage:
        """Return the stage. The fact `removed_lines` is the number of lines removed from a document."""

        def stage(batch: pa.RecordBatch) -> pa.RecordBatch:
            texts = batch.column("text").to_pylist()
            reasons: list[Reason] = [None] * len(texts)
            removed: list[dict[str, Any] | None] = [None] * len(texts)
            for row, facts in enumerate(facts_of(batch)):
                text = texts[row]
                if text is None or self._is_code(text, facts):
                    continue
                texts[row], lines = without_notices(text, self)
                removed[row] = {"removed_lines": lines} if lines else None
                reasons[row] = judge(texts[row], self, facts.get("language", ""))
            if any(removed):
                batch = with_meta(with_columns(batch, {"text": texts}), removed)
            return dropped(batch, self.name, reasons)

        return stage

    def _is_code(self, text: str, facts: dict[str, Any]) -> bool:
        """Tell whether a document is code, by the stage language if it was there before."""
        if self.kind != "auto" or "kind" in facts:
            return "code" in (self.kind, facts.get("kind"))
        return "language_score" not in facts and is_source_code(text)


class Page:
    """What the rules measure of a text."""

    def __init__(self, text: str, language: str = "") -> None:
        self.text = text[:MEASURED_CHARS]
        self.function_words = frozenset(_FUNCTION_WORDS.get(language, "").split())

    @cached_property
    def words(self) -> list[str]:
        """What white space separates."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What blank lines separate."""
        return [part for part in map(str.strip, re.split(r"\n\s*\n", self.text)) if part]

    @cached_property
    def chars_per_word(self) -> int:
        """Characters for a word, where white space does not separate words: 2 of Chinese or Japanese, 4 of
        Thai, Lao, Tibetan, Burmese or Khmer. 0 where it does: where such letters are fewer than 30 %."""
        if self.text.isascii():
            return 0
        ideographs, syllabic = (sum(map(len, found.findall(self.text))) for found in (_IDEOGRAPHS, _SYLLABIC))
        if not ideographs + syllabic:
            return 0
        others = _LETTERS.findall(_SYLLABIC.sub(" ", _IDEOGRAPHS.sub(" ", self.text)))
        other_letters = sum(map(len, others))
        letters = ideographs + syllabic + other_letters
        if ideographs + syllabic < UNSPACED_SHARE * letters:
            return 0
        return round(letters / (ideographs / 2 + syllabic / 4 + len(others)))


def _more(share: float, limit: float, what: str) -> str | None:
    return f"{share:.1%} {what}, more than {limit:.1%}" if share > limit else None


def _few_words(page: Page, limits: Quality) -> str | None:
    number = len(page.words)
    few = not page.chars_per_word and number < limits.min_words
    return f"{number:,} words, fewer than {limits.min_words:,}" if few else None


def _many_words(page: Page, limits: Quality) -> str | None:
    number = len(page.words)
    return f"{number:,} words, more than {limits.max_words:,}" if number > limits.max_words else None


def _word_length(page: Page, limits: Quality) -> str | None:
    if page.chars_per_word or not page.words:
        return None
    syllables = 0 if page.text.isascii() else len(_HANGUL.findall(page.text))
    mean = (sum(map(len, page.words)) + syllables) / len(page.words)
    low, high = limits.min_mean_word_chars, limits.max_mean_word_chars
    return None if low <= mean <= high else f"mean of {mean:.1f} characters, not {low:g} to {high:g}"


def _symbols(page: Page, limits: Quality) -> str | None:
    if page.chars_per_word or not page.words:
        return None
    ellipses = sum(map(page.text.count, _ELLIPSES))
    per_word = max(page.text.count("#"), ellipses) / len(page.words)
    limit = limits.max_symbols_per_word
    return f"{per_word:.2f} for each word, more than {limit:g}" if limit < 1 and per_word > limit else None


def _bullets(page: Page, limits: Quality) -> str | None:
    share = sum(line.startswith(_BULLETS) for line in page.lines) / max(1, len(page.lines))
    return _more(share, limits.max_bullet_lines, "of the lines")


def _ellipses(page: Page, limits: Quality) -> str | None:
    share = sum(line.endswith(_ELLIPSES) for line in page.lines) / max(1, len(page.lines))
    return _more(share, limits.max_ellipsis_lines, "of the lines")


def _letters(page: Page, limits: Quality) -> str | None:
    if page.chars_per_word or not page.words:
        return None
    share = len(_WORDS_WITH_LETTERS.findall(page.text)) / len(page.words)
    limit = limits.min_words_with_letters
    return f"{share:.1%} of the words have letters, less than {limit:.1%}" if share < limit else None


def _function_words(page: Page, limits: Quality) -> str | None:
    if not page.function_words:
        return None
    found = page.function_words & set(page.text.lower().split())
    few = len(found) < limits.min_function_words
    return f"{len(found)} different ones, fewer than {limits.min_function_words}" if few else None


def _lorem_ipsum(page: Page, limits: Quality) -> str | None:
    return "1 or more times" if limits.lorem_ipsum and "lorem ipsum" in page.text.lower() else None


def _curly_brackets(page: Page, limits: Quality) -> str | None:
    number = page.text.count("{") + page.text.count("}") if limits.curly_brackets else 0
    return f"{number:,} of them" if number else None


def _duplicates(parts: list[str], limit: float, char_limit: float, what: str) -> str | None:
    """Compare the shares of parts, and of their characters, that occurred before, with their limits."""
    distinct = set(parts)
    if len(distinct) == len(parts):
        return None
    chars = sum(map(len, parts))
    again = chars - sum(map(len, distinct))
    share = 1 - len(distinct) / len(parts)
    return _more(share, limit, f"of the {what}") or _more(again / chars, char_limit, "of the characters")


def _duplicate_lines(page: Page, limits: Quality) -> str | None:
    return _duplicates(page.lines, limits.max_duplicate_lines, limits.max_duplicate_line_chars, "lines")


def _duplicate_paragraphs(page: Page, limits: Quality) -> str | None:
    share, chars = limits.max_duplicate_paragraphs, limits.max_duplicate_paragraph_chars
    return _duplicates(page.paragraphs, share, chars, "paragraphs")


def _repeated_ngrams(page: Page, limits: Quality) -> str | None:
    width = page.chars_per_word or 1
    units = character_units(page.text, width) if page.chars_per_word else word_units(page.words)
    bounds = (*limits.max_top_ngrams, *limits.max_duplicate_ngrams)
    if not (found := too_repetitive(*units, bounds, width)):
        return None
    n, share = found
    which = f"the most frequent {n}-gram" if n in TOP_SIZES else f"repeated {n}-grams"
    return _more(share, bounds[n - 2], f"of the characters in {which}")


Rule = Callable[[Page, Quality], str | None]  # details of a document that breaks it
RULES: dict[str, Rule] = {  # by the reason, in the order of their use
    "too few words": _few_words,
    "too many words": _many_words,
    "mean word length": _word_length,
    "symbols": _symbols,
    "bullet points": _bullets,
    "ellipses at line ends": _ellipses,
    "words without letters": _letters,
    "few function words": _function_words,
    "lorem ipsum": _lorem_ipsum,
    "curly brackets": _curly_brackets,
    "duplicate lines": _duplicate_lines,
    "duplicate paragraphs": _duplicate_paragraphs,
    "repeated n-grams": _repeated_ngrams,
}


def judge(text: str, limits: Quality, language: str = "") -> Reason:
    """Return (reason, detail) by the first rule that a text breaks, None if there is none."""
    page = Page(text, language)
    for reason, rule in RULES.items():
        if detail := rule(page, limits):
            return reason, detail
    return None


def without_notices(text: str, limits: Quality) -> tuple[str, int]:
    """Remove the lines that ask for JavaScript, or point to policies; return also their number."""
    lower = text.lower()
    if not any(word in lower for word in ("javascript", "cookie", "policy", "terms of use")):
        return text, 0
    lines = text.split("\n")
    kept = [line for line in lines if not _is_notice(line.lower(), limits)]
    return "\n".join(kept), len(lines) - len(kept)


def _is_notice(line: str, limits: Quality) -> bool:
    asks = "javascript" in line and _ASKS.search(line) is not None
    bound = limits.javascript_line_words * asks
    if _POLICY.search(line):
        bound = max(bound, limits.policy_line_words)
    return bound > 0 and len(line.split(None, bound)) <= bound
