"""Stages that clean documents: repair, language, length, quality, mask."""

from __future__ import annotations

import functools
import json
import random
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from shoal.data.prepare.stages.documents import DOCUMENTS
from shoal.data.prepare.stages.language import Language
from shoal.data.prepare.stages.length import ESTIMATE, Length
from shoal.data.prepare.stages.mask import EMAIL, IPV4, IPV6, PHONE, Mask
from shoal.data.prepare.stages.quality import Page, Quality, judge
from shoal.data.prepare.stages.repair import Repair
from shoal.data.prepare.stages.repetition import character_units, too_repetitive, word_units
from shoal.data.prepare.stages.source_code import is_source_code
from shoal.errors import ConfigError, InputError

TEXTS = json.loads((Path(__file__).parent / "clean_texts.json").read_text("utf-8"))  # all of them should stay
ENGLISH, CHINESE, JAPANESE, THAI = (TEXTS[name] for name in ("english", "chinese", "japanese", "thai"))
KOREAN, MIXED, OTHERS, CODE = (TEXTS[name] for name in ("korean", "mixed", "others", "code"))
started = functools.cache(lambda settings: settings.start())


def batch_of(texts, metas=None):
    columns = {name: [None] * len(texts) for name in DOCUMENTS.names}
    columns |= {"file": [0] * len(texts), "offset": list(range(len(texts))), "line": [0] * len(texts)}
    columns |= {
        "text": list(texts),
        "meta": [json.dumps(meta) if meta else None for meta in metas or [None] * len(texts)],
    }
    return pa.RecordBatch.from_pydict(columns, schema=DOCUMENTS)


def rows(settings, texts, metas=None):
    """Return the documents after a stage, with their meta parsed."""
    found = started(settings)(batch_of(texts, metas)).to_pylist()
    return [row | {"meta": json.loads(row["meta"] or "{}")} for row in found]


def one(settings, text, **meta):
    return rows(settings, [text], [meta])[0]


# --- repair ---


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ("schÃ¶n und grÃ¼n", "schön und grün"),
        ("It doesnâ€™t matter", "It doesn’t matter"),
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("a\x00b\x08c\x7fd\ufeffe", "abcde"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("cafe\u0301", "café"),
        ("ключ\nÐºÐ»ÑŽÑ‡\nplain", "ключ\nключ\nplain"),
    ],
)
def test_broken_text_is_repaired_and_counted(broken, text):
    row = one(Repair(), broken, url="u")
    assert row["text"] == text
    assert row["meta"] == {"url": "u", "repaired": True}


@pytest.mark.parametrize(
    "text",
    [
        *CHINESE, *JAPANESE, *THAI, *KOREAN, *MIXED, *OTHERS, *CODE,
        "“Quoted” – it’s ﬁne… ＡＢＣ ｶﾀｶﾅ，。！？",
        "&amp; &lt;b&gt; stays HTML",
        "👩‍👩‍👧‍👦 family, می‌خواهم, क्‍ष",
        "page one\f\npage two\ttab",
        "Ünïcödé naïve façade Ærøskøbing ĳs ŉ",
    ],
)  # fmt: skip
def test_text_that_is_only_unusual_stays_as_it_is(text):
    row = one(Repair(), text)
    assert row["text"] == text
    assert row["meta"] == {}


def test_lines_that_are_not_looked_at_are_those_that_ftfy_leaves_alone():
    from ftfy import fix_text

    sound = [c for c in map(chr, range(0x2000, 0x20000)) if is_sound(c)]
    assert len(sound) > 30_000
    draw = random.Random(1)
    lines = ["".join(draw.choices(sound, k=12)) + draw.choice(["", "a b", "“", "’s"]) for _ in range(300)]
    # Each of the few that come from single-byte encodings, next to each other: the pairs of a wrong decoding.
    lines += [a + b for a in "–—‘’“”…" for b in "–—‘’“”…"]
    settings = {"unescape_html": False, "fix_character_width": False, "uncurl_quotes": False}
    assert [line for line in lines if fix_text(line, **settings) != line] == []
    assert [c for c in sound if unicodedata.normalize("NFC", c) != c] == []


def is_sound(char):
    from shoal.data.prepare.stages import repair

    return not repair._SUSPECT_LINE.search(char)


def test_encoding_can_be_left_alone():
    assert one(Repair(encoding=False), "schÃ¶n\x00")["text"] == "schÃ¶n"


# --- language ---


@pytest.mark.parametrize(
    ("texts", "code"),
    [(ENGLISH, "en"), (CHINESE, "zh"), (JAPANESE, "ja"), (THAI, "th"), (KOREAN, "ko"), (OTHERS[:1], "vi")],
)
def test_language_is_a_label_with_its_score(texts, code):
    for row in rows(Language(), texts):
        assert row["text"] is not None
        assert row["meta"]["language"] == code
        assert 0.7 < row["meta"]["language_score"] <= 1


def test_what_the_page_said_of_its_language_is_kept_apart():
    meta = one(Language(), ENGLISH[0], language="fr", url="u")["meta"]
    assert meta == {
        "url": "u",
        "page_language": "fr",
        "language": "en",
        "language_score": meta["language_score"],
    }


def test_a_language_that_is_not_wanted_is_dropped_with_its_score():
    found = rows(Language(keep=("en", "ja")), [ENGLISH[0], CHINESE[0], JAPANESE[0], "Hm?"])
    assert [row["reason"] for row in found] == [None, "language", None, "language"]
    assert found[1]["detail"] == "zh, 0.99"
    assert found[3]["detail"] == "und, 0.00"
    assert found[3]["meta"]["language"] == "und"
    assert found[1]["stage"] == "language"


def test_a_score_can_be_demanded():
    unsure = "taxi hotel internet radio video"
    score = one(Language(), unsure)["meta"]["language_score"]
    assert score < 0.9
    code = one(Language(), unsure)["meta"]["language"]
    row = one(Language(keep=(code,), min_score=0.95), unsure)
    assert (row["reason"], row["detail"]) == ("language score", f"{code}, {score:.2f}, less than 0.95")
    assert one(Language(keep=(code,)), unsure)["text"] == unsure


def test_an_unknown_language_code_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"language\.keep: english is not a known") as caught:
        Language(keep=("en", "english")).start()
    assert "de" in caught.value.hint.replace(",", "").split()


def test_the_middle_of_a_document_counts_too():
    text = "12.50 | 13.00\n" * 50 + ENGLISH[0] * 3 + "12.50 | 13.00\n" * 50
    assert one(Language(), text)["meta"]["language"] == "en"


def test_source_code_has_a_kind_and_no_language():
    found = rows(Language(keep=("en",)), CODE)
    assert [row["meta"] for row in found] == [{"kind": "code"}] * len(CODE)
    assert one(Language(kind="text"), CODE[0])["meta"].keys() == {"language", "language_score"}
    assert one(Language(kind="code"), ENGLISH[0])["meta"] == {"kind": "code"}


# --- length ---


@pytest.fixture
def gpt2(gpt2_folder):
    return str(gpt2_folder)


def test_length_is_counted_in_tokens_of_gpt2(gpt2):
    stage = Length(tokenizer=gpt2)
    words = " the" * 127
    found = rows(stage, [words, words + " the", "", "a" * 127])
    assert [row["detail"] for row in found[:3]] == [
        "127 tokens, fewer than 128", None, "0 tokens, fewer than 128"
    ]  # fmt: skip
    assert found[3]["reason"] == "too short"


def test_a_long_text_of_few_tokens_is_dropped_and_a_short_text_of_many_stays(gpt2):
    rule, han = "-" * 5000, "".join(chr(0x4E00 + 37 * n) for n in range(100))
    found = rows(Length(tokenizer=gpt2), [rule, han])
    assert found[0]["detail"].endswith(" tokens, fewer than 128")
    assert found[1]["reason"] is None


def test_documents_that_are_not_encoded_are_long_enough(gpt2):
    """The bounds say 128 only where the tokenizer does."""
    from shoal.data.prepare.stages.length import _counted
    from shoal.data.tokenizer import parse_tokenizer, read_tokenizer

    tokenizer = parse_tokenizer(read_tokenizer(Path(gpt2)), "gpt2")
    draw = random.Random(3)
    alphabets = ["ab \n", "-= \t\n", "的了。，", "a\x1c!\u00a0 \u2028", "é1² ", " "]
    texts = ["".join(draw.choices(draw.choice(alphabets), k=draw.randrange(900))) for _ in range(120)]
    texts += ENGLISH + CHINESE + CODE + [" " * n * 100 for n in range(9)]
    for minimum in (1, 17, 128):
        exact = [min(len(tokenizer.encode(text)), minimum) for text in texts]
        assert _counted(gpt2, minimum)(texts) == exact


def test_long_documents_are_never_encoded(gpt2, monkeypatch):
    from shoal.data.tokenizer import Tokenizer

    stage = Length(tokenizer=gpt2).start()
    seen = []
    real = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts: seen.extend(texts) or real(self, texts)
    )
    kept = stage(batch_of(["x" * 10_000_000, ENGLISH[0] * 2, "short", "的" * 20_000]))
    assert seen == ["short"]
    assert kept.column("stage").to_pylist() == [None, None, "length", None]


def test_a_tokenizer_without_known_cuts_counts_too(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    built = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Punctuation()
    built.save(str(tmp_path / "tokenizer.json"))
    stage = Length(tokenizer=str(tmp_path), min_tokens=4)
    assert [r["detail"] for r in rows(stage, ["a,b", "a,b,c"])] == ["3 tokens, fewer than 4", None]


def test_the_estimate_says_that_it_is_one():
    stage = Length(tokenizer=ESTIMATE)
    found = rows(stage, ["a" * 511, "a" * 512, "的" * 64, "的" * 63])
    assert [row["detail"] for row in found] == [
        "127 estimated tokens, fewer than 128", None, None, "126 estimated tokens, fewer than 128",
    ]  # fmt: skip


def test_the_estimate_is_near_the_count_of_gpt2(gpt2):
    from shoal.data.prepare.stages.length import _estimated
    from shoal.data.tokenizer import parse_tokenizer, read_tokenizer

    tokenizer = parse_tokenizer(read_tokenizer(Path(gpt2)), "gpt2")
    for text in ENGLISH + CHINESE + JAPANESE + THAI + KOREAN + OTHERS:
        assert _estimated([text])[0] == pytest.approx(len(tokenizer.encode(text)), rel=0.45)


def test_without_the_vocabulary_of_gpt2_the_length_is_estimated_and_that_is_said(monkeypatch):
    def absent():
        raise OSError("no network")

    monkeypatch.setattr("tiktoken_ext.openai_public.gpt2", absent)
    said = []
    assert Length().resolved(said.append) == Length(tokenizer=ESTIMATE)
    assert said == [
        "GPT-2's vocabulary is not in tiktoken's cache and cannot be downloaded: OSError; the length of "
        "documents is estimated"
    ]
    with pytest.raises(InputError, match="GPT-2's vocabulary"):
        Length().start()
    assert Length(tokenizer="bytes").resolved(said.append) == Length(tokenizer="bytes")


def test_a_maximum_of_characters_can_be_set():
    stage = Length(tokenizer=ESTIMATE, min_tokens=0, max_chars=10)
    found = rows(stage, ["x" * 10, "x" * 11])
    assert [(row["reason"], row["detail"]) for row in found] == [
        (None, None), ("too long", "11 characters, more than 10")
    ]  # fmt: skip


# --- quality: a document for each rule ---

WORDS = [f"w{chr(97 + n % 26)}{chr(97 + n // 26)}rd" for n in range(400)]  # of 5 letters each, all different
PROSE = ENGLISH[0]  # 105 words, 5 sentences
LINES = PROSE.replace(". ", ".\n")
BLOCK = " ".join(WORDS[:100])
RULE_CASES = {
    "min_words": ("too few words", " ".join(PROSE.split()[:49]), "49 words, fewer than 50"),
    "max_words": ("too many words", "a bc def " * 33_334, "100,002 words, more than 100,000"),
    "min_mean_word_chars": (
        "mean word length",
        " ".join(word[1:3] for word in WORDS),
        "mean of 2.0 characters, not 3 to ",
    ),
    "max_mean_word_chars": (
        "mean word length",
        " ".join(word * 3 for word in WORDS[:60]),
        "mean of 15.0 characters, not 0 to 10",
    ),
    "max_symbols_per_word": ("symbols", PROSE + " #sea #ice #net" * 4, "0.10 for each word, more than 0.1"),
    "max_bullet_lines": (
        "bullet points",
        "• " + LINES.replace("\n", "\n- "),
        "100.0% of the lines, more than 90.0%",
    ),
    "max_ellipsis_lines": (
        "ellipses at line ends",
        LINES.replace(".\n", "...\n", 1).replace("\n", "…\n", 2).replace("...…", "..."),
        "40.0% of the lines, more than 30.0%",
    ),
    "min_words_with_letters": (
        "words without letters",
        PROSE + "".join(f" {n} 12:{n}" for n in range(15, 30)),
        "77.8% of the words have letters, less than 80.0%",
    ),
    "min_function_words": ("few function words", BLOCK + " the the", "1 different ones, fewer than 2"),
    "lorem_ipsum": ("lorem ipsum", PROSE + " Lorem ipsum dolor", "1 or more times"),
    "curly_brackets": ("curly brackets", PROSE + " {name}", "2 of them"),
    "max_duplicate_lines": (
        "duplicate lines",
        LINES + "\nNo.\nNo.\nYes.\nYes.\nOh.\nOh.\nOh.",
        "33.3% of the lines, more than 30.0%",
    ),
    "max_duplicate_line_chars": (
        "duplicate lines",
        "\n".join([LINES, *LINES.split("\n")[2:4]]),
        "% of the characters, more than 20.0%",
    ),
    "max_duplicate_paragraphs": (
        "duplicate paragraphs",
        PROSE + "\n\nNo. 1\nIt is\n\nNo. 1\nIt is\n\nNo. 1\nIt is",
        "50.0% of the paragraphs, more than 30.0%",
    ),
    "max_duplicate_paragraph_chars": (
        "duplicate paragraphs",
        "\n\n".join([*LINES.split("\n"), *LINES.split("\n")[2:4]]),
        "% of the characters, more than 20.0%",
    ),
    "max_top_ngrams": (
        "repeated n-grams",
        "".join(f"{word} once again " for word in WORDS[:50]),
        "64.3% of the characters in the most frequent 2-gram, more than 20.0%",
    ),
    "max_duplicate_ngrams": (
        "repeated n-grams",
        f"{BLOCK} {' '.join(WORDS[:20])}",
        "16.7% of the characters in repeated 5-grams, more than 15.0%",
    ),
}
OFF = {
    **dict.fromkeys(("min_words", "min_mean_word_chars", "min_words_with_letters", "min_function_words"), 0),
    "max_words": 10**6,
    "max_mean_word_chars": 1e6,
    "lorem_ipsum": False,
    "curly_brackets": False,
    "max_top_ngrams": (1, 1, 1),
    "max_duplicate_ngrams": (1,) * 6,
}


@pytest.mark.parametrize("rule", RULE_CASES)
def test_each_rule_drops_its_document_and_no_other_rule_does(rule):
    reason, text, detail = RULE_CASES[rule]
    setting = {"curly_brackets": True} if rule == "curly_brackets" else {}
    others_off = {name: OFF.get(name, 1) for name in RULE_CASES if name != rule}
    row = one(Quality(**others_off, **setting), text, language="en", language_score=1)
    assert (row["stage"], row["reason"], row["text"]) == ("quality", reason, None)
    assert detail in row["detail"]
    all_off = {name: OFF.get(name, 1) for name in RULE_CASES}
    assert one(Quality(**all_off), text, language="en", language_score=1)["text"] == text


def test_text_that_breaks_no_rule_stays_as_it_is():
    for row, text in zip(rows(Quality(), ENGLISH), ENGLISH, strict=True):
        assert (row["text"], row["meta"]) == (text, {})


def test_the_first_rule_that_is_broken_gives_the_reason():
    assert judge("Lorem ipsum {", Quality(curly_brackets=True))[0] == "too few words"


def test_function_words_are_counted_in_the_language_of_the_document():
    german = " ".join([*WORDS[:60], "der", "und"])
    for code, reason in (("de", None), ("en", "few function words"), ("fi", None)):
        assert one(Quality(), german, language=code, language_score=1)["reason"] == reason
    assert one(Quality(), german)["reason"] is None  # no label: the rule does not apply


@pytest.mark.parametrize(
    ("line", "removed"),
    [
        ("Please enable JavaScript to view the comments.", True),
        ("This site uses cookies to improve your visit.", True),
        ("Read our Privacy Policy and Terms of Use", True),
        ("JavaScript was named in 1995, and it has little to do with Java.", False),
        ("The cookie jar stood on the shelf.", False),
        (f"Read our privacy policy: {' '.join(WORDS[:30])}", False),
    ],
)
def test_notices_about_javascript_and_policies_are_removed(line, removed):
    text = f"{PROSE}\n{line}\nThe end."
    row = one(Quality(), text)
    assert row["text"] == (f"{PROSE}\nThe end." if removed else text)
    assert row["meta"] == ({"removed_lines": 1} if removed else {})
    assert one(Quality(javascript_line_words=0, policy_line_words=0), text)["text"] == text


# --- repetition against a plain count ---


def plain_shares(units, lengths, width):
    """Count the shares of characters in n-grams of 2 to 10 by dictionaries."""
    total, shares = sum(lengths), []
    for n in range(2, 11):
        size = n * width
        grams = [tuple(units[i : i + size]) for i in range(len(units) - size + 1)]
        counts = Counter(grams)
        most = max(counts.values(), default=0)
        options = []
        for gram in [g for g in counts if counts[g] == most] if most > 1 and n < 5 else []:
            starts = [i for i, g in enumerate(grams) if g == gram]
            options.append((sum(lengths[starts[0] : starts[0] + size]), starts))
        if n >= 5:
            seen = set()
            options = [(0, [i for i, g in enumerate(grams) if g in seen or seen.add(g)])]
        longest = max((length for length, _ in options), default=0)
        covered = [
            {i + k for i in starts for k in range(size)} for length, starts in options if length == longest
        ]
        shares.append([sum(lengths[i] for i in units_of) / total for units_of in covered] or [0])
    return shares


@pytest.mark.parametrize("width", [1, 2, 4])
def test_shares_of_repeated_ngrams_are_those_of_a_plain_count(width):
    draw = random.Random(width)
    for _ in range(60):
        alphabet = ["a", "bb", "ccc", "dd", "e", "ffff", "gg"][: draw.randrange(1, 8)]
        words = draw.choices(alphabet, k=draw.randrange(2, 60))
        words += words[: draw.randrange(20)]
        text = "".join(word[0] for word in words)
        ids, lengths = word_units(words) if width == 1 else character_units(text, width)
        units, sizes = (words, list(map(len, words))) if width == 1 else (list(text), [1] * len(text))
        for n, options in enumerate(plain_shares(units, sizes, width), start=2):
            free = [1.0] * 9
            free[n - 2] = min(options) - 1e-9
            found = too_repetitive(ids, lengths, free, width)
            if max(options) == 0:
                assert found is None
            elif found is not None:
                assert found[0] == n
                assert any(found[1] == pytest.approx(share) for share in options)
            free[n - 2] = max(options) + 1e-9
            assert too_repetitive(ids, lengths, free, width) is None
            assert found is not None or max(options) == 0


# --- scripts without spaces ---


@pytest.mark.parametrize("text", [*CHINESE, *JAPANESE, *THAI, *KOREAN, *MIXED, *OTHERS, *ENGLISH])
def test_text_of_any_language_goes_through_all_stages_unchanged(text):
    batch = batch_of([text])
    for settings in (Repair(), Language(), Length(tokenizer=ESTIMATE, min_tokens=16), Quality(), Mask()):
        batch = started(settings)(batch)
    assert batch.column("text").to_pylist() == [text]


@pytest.mark.parametrize(
    ("text", "chars"),
    [
        (CHINESE[0], 2), (JAPANESE[0], 2), (THAI[0], 4), (MIXED[0], 3), (KOREAN[0], 0), (ENGLISH[0], 0),
        (ENGLISH[0] + " “" + CHINESE[2] + "”", 0), ("ພາສາລາວ", 4), ("ភាសាខ្មែរ", 4), ("မြန်မာဘာသာ", 4),
    ],
)  # fmt: skip
def test_the_script_decides_what_a_word_is(text, chars):
    assert Page(text).chars_per_word == chars


@pytest.mark.parametrize("texts", [CHINESE, JAPANESE, THAI], ids=["zh", "ja", "th"])
def test_repetition_is_found_without_spaces(texts):
    assert judge(texts[0] * 2, Quality())[0] == "repeated n-grams"
    assert judge(f"{texts[0]}\n{texts[0]}", Quality())[0] == "duplicate lines"
    assert judge(texts[0][:7] * 30, Quality())[0] == "repeated n-grams"
    assert judge(texts[0] + texts[1], Quality()) is None


# --- source code ---


def test_no_rule_applies_to_source_code():
    for text in CODE:
        assert one(Quality(), text)["text"] == text
        assert one(Quality(), text, kind="code")["text"] == text
        assert one(Quality(kind="text"), text)["text"] is None or len(text.split()) >= 50
    assert one(Quality(), CODE[1], language="en", language_score=0.7)["reason"] == "too few words"
    assert one(Quality(kind="code"), "Too short.")["text"] == "Too short."
    assert one(Quality(kind="text"), CODE[1])["reason"] == "too few words"


def test_source_code_is_told_from_text():
    library = Path(json.__file__).parents[1]
    files = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))]
    files = [text for text in files if len(text) >= 400]
    assert sum(map(is_source_code, files)) / len(files) > 0.97
    docs = [path.read_text("utf-8") for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))]
    assert sum(map(is_source_code, docs)) == 0
    assert not any(
        map(is_source_code, [*ENGLISH, *CHINESE, *JAPANESE, *THAI, *KOREAN, *MIXED, *OTHERS, "", "\n"])
    )


def test_real_text_is_not_taken_for_code(shared):
    texts = [(shared / "text" / name).read_text() for name in ("wikitext2.test.txt", "tinyshakespeare.txt")]
    parts = [text[at : at + 2000] for text in texts for at in range(0, len(text), 2000)]
    assert sum(map(is_source_code, parts)) < 0.005 * len(parts)


# --- mask ---


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jane.doe+news@mail.example.org.", f"Write to {EMAIL}."),
        ("<a_b@c-d.co.uk>, x@y.de", f"<{EMAIL}>, {EMAIL}"),
        ("联系邮箱:li.wei@corp.cn。", f"联系邮箱:{EMAIL}。"),
        ("The host 8.8.8.8, or 1.2.3.4.", f"The host {IPV4}, or {IPV4}."),
        ("http://93.184.216.34:8080/x", f"http://{IPV4}:8080/x"),
        ("at 2a00:1450:4001:82a::200e now", f"at {IPV6} now"),
        ("[2606:4700::1111]:443", f"[{IPV6}]:443"),
    ],
)
def test_personal_data_is_masked_and_counted(text, masked):
    row = one(Mask(), text, url="u")
    assert row["text"] == masked
    assert row["meta"] == {"url": "u", "masked": max(masked.count(p) for p in (EMAIL, IPV4, IPV6))}
    assert one(Mask(), masked)["meta"] == {}  # placeholders are not masked again


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1 10.0.0.8 192.168.1.20 0.0.0.0 and ::1 and fe80::1",
        "version 1.2.3.4, v2.31.4.18, Release: 11.4.0.1 and 7.1.2.3-rc1",
        "1.3.6.1.4.1.311 and 1.2.3 and 999.1.1.1 and 10.20.30.40.50 and x1.2.3.4",
        "git@github.com:team/tool.git",
        "@decorator user@localhost a @ b.c lodash@4.17.21",
        "std::vector 2023:10:15 abcd::beef 12:30:45 2001:db8::7",
        "+1 555 is short, 1 + 2 - 3, +49301234567 and x+1 202 555 0199",
    ],
)
def test_what_is_no_personal_data_stays(text):
    row = one(Mask(), text)
    assert (row["text"], row["meta"]) == (text, {})


def test_telephone_numbers_are_masked_if_asked():
    text = "Call +49 30 901820-14 or +1 (202) 555-0143, not +1 22 33. 1 +2 345 = 6"
    assert one(Mask(what=("phone",)), text)["text"] == f"Call {PHONE} or {PHONE}, not +1 22 33. 1 +2 345 = 6"
    assert one(Mask(), text)["text"] == text
    assert one(Mask(what=()), "a@b.org 8.8.8.8")["meta"] == {}


# --- all stages ---

STAGES = [Repair(), Language(keep=("en", "zh")), Length(tokenizer=ESTIMATE, min_tokens=64), Quality(), Mask()]


def chain(texts, size):
    out = []
    stages = [started(settings) for settings in STAGES]
    for at in range(0, len(texts), size):
        batch = batch_of(texts[at : at + size])
        for stage in stages:
            batch = stage(batch)
        assert batch.schema == DOCUMENTS
        out += [{k: v for k, v in row.items() if k != "offset"} for row in batch.to_pylist()]
    return out


def test_a_documents_fate_depends_on_nothing_beside_it():
    repeated = f"{ENGLISH[1]} {ENGLISH[1]}"
    texts = [*ENGLISH, *CHINESE, *THAI, *CODE, repeated, "Too short.", ""]
    texts += [text for _, text, _ in RULE_CASES.values()]
    found = chain(texts, len(texts))
    assert found == chain(texts, 1) == chain(texts, 7)
    assert found == chain(texts[::-1], 5)[::-1]
    counts = Counter((row["stage"], row["reason"]) for row in found)
    assert sum(counts.values()) == len(texts)
    assert counts["language", "language"] >= len(THAI)
    assert counts["length", "too short"] >= 2
    assert counts["quality", "repeated n-grams"] >= 1
    for row in found:
        assert (row["text"] is None) == (row["stage"] is not None) == bool(row["reason"] and row["detail"])


def test_documents_that_were_dropped_before_stay_as_they_are():
    batch = batch_of(["x", None], [None, {"url": "u"}])
    columns = dict(zip(DOCUMENTS.names, batch.columns, strict=True))
    for name, value in (("stage", "extract"), ("reason", "empty"), ("detail", "no text")):
        columns[name] = pa.array([None, value])
    batch = pa.RecordBatch.from_pydict(columns, schema=DOCUMENTS)
    for settings in STAGES:
        assert started(settings)(batch).to_pylist()[1] == batch.to_pylist()[1]


HOSTILE = {
    "one character": "x" * 10_000_000,
    "one letter of Chinese": "的" * 3_000_000,
    "one line end": "\n" * 3_000_000,
    "carriage returns": "\r" * 2_000_000,
    "many lines": "word\n" * 1_000_000,
    "different lines": "".join(f"{n} words\n" for n in range(1_000_000)),
    "brackets": "(" * 2_000_000,
    "quotes": "it’s “" * 500_000,
    "broken encoding": "Ã©Â" * 150_000,
    "control characters": "\x00\x1b[" * 500_000,
    "combining": "a" + "\u0301" * 100_000,
    "at signs": "a@" * 1_000_000,
    "dots": "1." * 1_000_000,
    "colons": "2001:" * 500_000,
    "plus signs": "+1 1 " * 500_000,
    "javascript": "javascript " * 500_000,
    "letters and dots": "a.b-" * 700_000,
    "assignments": "a: b, " * 500_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_end_in_text_or_a_reason(name):
    for settings in (
        *STAGES[:2],
        Length(tokenizer=ESTIMATE),
        Quality(kind="text"),
        Mask(what=("email", "ip", "phone")),
    ):
        row = one(settings, HOSTILE[name])
        assert (row["text"] is None) == bool(row["reason"] and row["detail"])


def test_control_characters_do_not_survive_repair():
    text = one(Repair(), HOSTILE["control characters"])["text"]
    assert not set(text) & set(map(chr, range(9)))
