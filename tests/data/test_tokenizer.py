from __future__ import annotations

import json
import random
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from shoal.data import tokenizer as tokenizer_module
from shoal.data.boundaries import BETWEEN_WORDS, sentencepiece_boundary
from shoal.data.bytelevel import BYTE_OF, CUTTABLE_PATTERNS, GPT2_PATTERN, merges_of, tiktoken_ranks, to_bytes
from shoal.data.prepare.vocabulary import fixed_tokenizer
from shoal.data.tokenizer import PIECE_BYTES, bytes_tokenizer_json, load_tokenizer, parse_tokenizer
from shoal.errors import DataError, ShoalError
from tests.data.byte_level import byte_level

CHINESE = "敏捷的棕色狐狸跳过了懒狗。人人生而自由,在尊严和权利上一律平等。\n他们赋有理性和良心!"
EMOJI = "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☕️ e\u0301 ﷽ 𝔘𝔫𝔦 \u200d\ufeff 🤷🏿‍♀️"
ODD = "a  b\t\tc\r\nd \n\n  e   \u00a0\u2003x '''s 's 'S ll've 12345 ½ ² ٣ I'm\x00\x01"


def random_strings(number, seed=7):
    """Strings from all over Unicode, with runs of blanks, quotes and digits between."""
    draw = random.Random(seed)
    ranges = [(0x20, 0x7E), (0x20, 0x7E), (0, 0x20), (0x80, 0x2FF), (0x300, 0x36F), (0x400, 0x5FF)]
    ranges += [(0x2000, 0x206F), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF)]
    ranges += [(0x10000, 0x1FFFF), (0x20000, 0x2A6DF)]
    for _ in range(number):
        parts = []
        for _ in range(draw.randrange(1, 8)):
            low, high = draw.choice(ranges)
            parts.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randrange(1, 8))))
            parts.append(draw.choice(["", " ", "  ", "\n", "'s", "'", "\u00a0", "12"]))
        yield "".join(parts)


@pytest.fixture(scope="module")
def gpt2(gpt2_folder):
    return parse_tokenizer(fixed_tokenizer(str(gpt2_folder)), "gpt2")


@pytest.fixture(scope="module")
def texts(shared):
    shakespeare = (shared / "text" / "tinyshakespeare.txt").read_text()[:300_000]
    return [shakespeare, CHINESE * 30, EMOJI * 30, ODD * 10, "<|endoftext|>", "", *random_strings(10_000)]


def test_gpt2_ids_are_those_of_three_references(gpt2, gpt2_folder, texts, tmp_path, monkeypatch):
    from transformers import GPT2Tokenizer

    ours = [ids.tolist() for ids in gpt2.encode_batch(texts)]
    assert ours == [found.ids for found in gpt2._backend.reference.encode_batch_fast(texts)]
    theirs = gpt2_of_tiktoken(gpt2_folder, tmp_path, monkeypatch)
    assert ours == [theirs.encode_ordinary(text) for text in texts]
    plain = [n for n, text in enumerate(texts) if "<|endoftext|>" not in text]
    found = GPT2Tokenizer.from_pretrained(gpt2_folder)([texts[n] for n in plain]).input_ids
    assert [ours[n] for n in plain] == found
    assert (gpt2.vocab_size, gpt2.eod_id) == (50257, 50256)


def gpt2_of_tiktoken(folder, cache, monkeypatch):
    """Return tiktoken's own GPT-2, its cache filled from the folder."""
    import hashlib

    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for theirs, ours in (("vocab.bpe", "merges.txt"), ("encoder.json", "vocab.json")):
        name = hashlib.sha1((base + theirs).encode()).hexdigest()
        (cache / name).write_bytes((folder / ours).read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    return tiktoken.get_encoding("gpt2")


def test_gpt2_from_tiktokens_cache_is_the_same_tokenizer(gpt2_folder, tmp_path, monkeypatch):
    gpt2_of_tiktoken(gpt2_folder, tmp_path, monkeypatch)
    assert json.loads(fixed_tokenizer("gpt2")) == json.loads(fixed_tokenizer(str(gpt2_folder)))


def test_gpt2_out_of_reach_says_what_to_do(tmp_path, monkeypatch):
    from tiktoken_ext import openai_public

    def offline():
        raise OSError("no network")

    monkeypatch.setattr(openai_public, "gpt2", offline)
    with pytest.raises(ShoalError, match="not in tiktoken's cache and cannot be downloaded") as error:
        fixed_tokenizer("gpt2")
    assert "vocab.json and merges.txt" in error.value.hint


@pytest.mark.parametrize("end", [0x10000, pytest.param(0x110000, marks=pytest.mark.proof)])
def test_both_libraries_sort_every_character_alike(end):
    """The proof of equal ids rests on this; a release with newer Unicode tables breaks it here."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, end)]))
    single = {bytes([byte]): byte for byte in range(256)}
    for kind in (r"\p{L}", r"\p{N}", r"\s"):
        split = pre_tokenizers.Split(Regex(kind + "+"), "removed", invert=True)
        one = {char for run, _ in split.pre_tokenize_str(every) for char in run}
        core = tiktoken.Encoding("x", pat_str=kind, mergeable_ranks=single, special_tokens={})
        assert one == set(bytes(core.encode_ordinary(every)).decode()), kind


def test_merges_on_which_the_libraries_differ_are_not_given_to_tiktoken():
    """`abc` comes from (a, bc), though ab merges first: yet tiktoken would join ab + c."""
    merges = [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc")]
    assert tiktoken_ranks(merges) is None
    assert tiktoken_ranks([(b"a", b"b"), (b"ab", b"c")]) is not None
    assert tiktoken_ranks([(b"a", b"b"), (b"a", b"b")]) is None


def test_an_odd_bpe_still_gets_the_references_ids():
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"ab": 256, "bc": 257, "abc": 258}
    content = gpt2_like(vocab, merges).to_str()
    ours, reference = parse_tokenizer(content.encode(), "odd"), Reference.from_str(content)
    for text in ("abc", "bc abc", "aabcc abcabc", "abc " * 20_000):
        assert ours.encode(text) == reference.encode(text).ids


@pytest.mark.parametrize("tokens", [("ab", "abc", "bcd"), ("bcd",)], ids=["merges", "bytes"])
def test_words_that_stay_whole_have_the_references_ids_in_texts_of_any_length(tokens):
    """`bcd` is a token that no merge makes: with `ignore_merges` the word is it, else three bytes."""
    vocab = BYTE_OF | {token: 256 + n for n, token in enumerate(tokens)}
    merges = [("a", "b"), ("ab", "c")] if "ab" in tokens else []
    spec = json.loads(gpt2_like(vocab, merges).to_str())
    for ignore_merges in (True, False):
        spec["model"]["ignore_merges"] = ignore_merges
        content = json.dumps(spec)
        ours, reference = parse_tokenizer(content.encode(), "whole"), Reference.from_str(content)
        for text in ("bcd", "bcd abc", "bcd abcd\n" * 20_000):
            assert ours.encode(text) == reference.encode(text).ids, (ignore_merges, text[:20])


def test_merges_are_recovered_from_ranks(gpt2_folder):
    lines = (gpt2_folder / "merges.txt").read_text().splitlines()[1:2001]
    pairs = [tuple(to_bytes(part) for part in line.split(" ")) for line in lines]
    assert merges_of(tiktoken_ranks(pairs)) == pairs


def gpt2_like(vocab, merges, pattern=GPT2_PATTERN):
    built = byte_level(models.BPE(vocab=vocab, merges=merges), pattern)
    built.add_special_tokens(["<|endoftext|>"])
    return built


def test_the_alphabet_of_bytes_is_that_of_the_library():
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    to_library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(128):
        [(char, _)] = to_library.pre_tokenize_str(chr(byte))
        assert BYTE_OF[char] == byte


# --- long texts ---


@pytest.fixture(scope="module", params=sorted(CUTTABLE_PATTERNS))
def cut_tokenizer(request, gpt2_folder):
    """GPT-2's merges under each pattern that we cut."""
    model = json.loads(fixed_tokenizer(str(gpt2_folder)))["model"]
    built = gpt2_like(model["vocab"], [tuple(pair) for pair in model["merges"]], request.param)
    return parse_tokenizer(built.to_str().encode(), "cut"), built


def test_every_cut_leaves_the_ids_as_they_are(cut_tokenizer, texts):
    ours, reference = cut_tokenizer
    reference.encode_special_tokens = True
    cuts = 0
    for text in [texts[0][:20_000], CHINESE * 3, EMOJI * 3, ODD * 3, *random_strings(1500, seed=3)]:
        data = text.encode()
        whole = reference.encode(text).ids
        at = ours.cut.find(data, 1)
        while at is not None and at < len(data):
            left, right = data[:at].decode(), data[at:].decode()
            if len(data) < 1000 or cuts % 50 == 0:
                assert reference.encode(left).ids + reference.encode(right).ids == whole, (
                    left[-9:],
                    right[:9],
                )
            cuts += 1
            at = ours.cut.find(data, at + 1)
    assert cuts > 3000


@pytest.mark.parametrize("part", ["The quick brown fox ", CHINESE, EMOJI, ODD, "x", " ", "\n", "12 "])
def test_a_long_text_has_the_ids_of_the_uncut_one(gpt2, part, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE_BYTES", 5000)
    text = part * (20_000 // len(part.encode()))
    assert gpt2.encode(text) == gpt2._backend.reference.encode(text).ids


def test_a_long_text_of_bytes_is_its_bytes():
    text = (EMOJI + CHINESE) * 6000
    assert len(text) > PIECE_BYTES // 4
    assert bytes(parse_tokenizer(bytes_tokenizer_json().encode(), "b").encode(text)).decode() == text


@pytest.mark.parametrize(
    "change",
    [
        lambda built: setattr(built, "normalizer", normalizers.NFC()),
        lambda built: setattr(built, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda built: setattr(built, "pre_tokenizer", pre_tokenizers.BertPreTokenizer()),
        lambda built: built.add_tokens([AddedToken("b c", special=False)]),
    ],
)
def test_a_tokenizer_whose_cuts_are_not_known_is_not_cut(change):
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = gpt2_like(vocab, [])
    change(built)
    ours = parse_tokenizer(built.to_str().encode(), "uncut")
    assert ours.cut is None
    built.encode_special_tokens = True
    assert ours.encode("a b c") == built.encode("a b c", add_special_tokens=False).ids


# --- special tokens, bytes, other kinds ---


def test_the_text_of_a_special_token_stays_text(gpt2):
    for tokenizer in (gpt2, parse_tokenizer(bytes_tokenizer_json().encode(), "b")):
        text = "end <|endoftext|> here"
        ids = tokenizer.encode(text)
        assert tokenizer.eod_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eod_id]) == text


def test_bytes_are_a_tokenizer_json_that_the_library_loads():
    ours = parse_tokenizer(bytes_tokenizer_json().encode(), "b")
    reference = Reference.from_str(bytes_tokenizer_json())
    for text in [CHINESE, EMOJI, ODD, *random_strings(100)]:
        assert ours.encode(text) == list(text.encode()) == reference.encode(text).ids
    assert (ours.vocab_size, ours.eod_id, reference.token_to_id("<|endoftext|>")) == (257, 256, 256)


def test_padding_truncation_and_begin_tokens_in_a_file_are_left_alone():
    from tokenizers.processors import TemplateProcessing

    built = Reference.from_str(bytes_tokenizer_json())
    built.enable_truncation(3)
    built.enable_padding(length=9)
    built.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    ours = parse_tokenizer(
        built.to_str().replace('"byte_fallback":false', '"byte_fallback":true').encode(), "x"
    )
    assert ours.encode("hello") == list(b"hello")


def test_dropout_in_a_file_is_left_alone():
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"ab": 256}
    built = gpt2_like(vocab, [("a", "b")])
    built.model.dropout = 0.5
    ours = parse_tokenizer(built.to_str().encode(), "x")
    assert ours.encode("ab" * 200) == [256] * 200


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("spm"))


def train_sentencepiece(folder, **changes):
    """Train a small SentencePiece model; return its file."""
    lines = folder / "text.txt"
    words = ["the", "of", "and", "people", "nation", "time", "music", "water", "language", "history"]
    draw = random.Random(1)
    lines.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(2000)) + "\n" + CHINESE)
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines), model_prefix=str(folder / "m"), byte_fallback=True,
        minloglevel=2, **{"model_type": "bpe", "vocab_size": 360, **changes},
    )  # fmt: skip
    return folder / "m.model"


def test_sentencepiece_ids_are_the_librarys(sentencepiece_file):
    from sentencepiece import SentencePieceProcessor

    ours, theirs = load_tokenizer(sentencepiece_file), SentencePieceProcessor(str(sentencepiece_file))
    strings = ["people of the world", CHINESE, EMOJI, ODD.replace("\x00", ""), "</s>", *random_strings(500)]
    for text, ids in zip(strings, ours.encode_batch(strings), strict=True):
        assert ids.tolist() == theirs.encode(text)
    assert ours.eod_id == theirs.eos_id()
    assert ours.decode(ours.encode("people of the world")) == "people of the world"


@pytest.mark.parametrize("extra", [True, False])
def test_a_long_text_under_a_sentencepiece_bpe_is_cut_between_words(tmp_path, monkeypatch, extra):
    from sentencepiece import SentencePieceProcessor

    file = train_sentencepiece(tmp_path, remove_extra_whitespaces=extra, normalization_rule_name="identity")
    ours, theirs = load_tokenizer(file), SentencePieceProcessor(str(file))
    monkeypatch.setattr(tokenizer_module, "PIECE_BYTES", 40)
    words = " ".join(
        random.Random(2).choices(["people", "of", "the  world", "nation.", "12", "(a)", "\n"], k=3000)
    )
    for text in (words, CHINESE * 20, EMOJI * 20 + " x y z " * 30):
        assert ours.encode(text) == theirs.encode(text)
    assert len(list(ours._pieces(words))) > 100


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "unigram", "vocab_size": 280},
        {"add_dummy_prefix": False},
        {"treat_whitespace_as_suffix": True},
        {"split_by_whitespace": False},
        {"user_defined_symbols": ["people of"]},
    ],
)
def test_a_sentencepiece_model_whose_cuts_are_not_known_is_not_cut(tmp_path, changes):
    assert load_tokenizer(train_sentencepiece(tmp_path, **changes)).cut is None


@pytest.mark.parametrize(
    "extra", [b"", b"\x49" + b"\xff" * 8, b"\x4d" + b"\xff" * 4, b"\x4a\x02ab", b"\x48\x01"]
)
def test_a_sentencepiece_model_with_fields_of_any_kind_is_cut(extra):
    trainer, normaliser = b"\x18\x02", b"\x0a\x08identity"  # model_type = BPE, name
    model = b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a" + bytes([len(normaliser)]) + normaliser
    assert sentencepiece_boundary(extra + model, ["\u2581the", "a"]) is BETWEEN_WORDS
    assert sentencepiece_boundary(b"\x4f" + model, ["\u2581the", "a"]) is None  # no such kind


# --- streams ---


def kinds(gpt2, sentencepiece_file):
    return [gpt2, parse_tokenizer(bytes_tokenizer_json().encode(), "b"), load_tokenizer(sentencepiece_file)]


def test_a_stream_never_returns_half_a_character(gpt2, sentencepiece_file):
    for tokenizer in kinds(gpt2, sentencepiece_file):
        for text in [CHINESE, EMOJI, "plain words, and more"]:
            stream, ids = tokenizer.stream(), tokenizer.encode(text)
            parts = [stream.push(i) for i in ids]
            assert not any("\ufffd" in part for part in parts)
            assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


def test_a_stream_that_ends_inside_a_character_says_so():
    stream = parse_tokenizer(bytes_tokenizer_json().encode(), "b").stream()
    assert [stream.push(byte) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(ord("b")) == "b"


def test_a_stream_gets_over_bytes_that_are_no_character():
    stream = parse_tokenizer(bytes_tokenizer_json().encode(), "b").stream()
    assert "".join(stream.push(byte) for byte in [0x80, 0xFF, *b"ok"]) == "\ufffd\ufffdok"


# --- files from strangers ---


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b'{"model": []}',
        b'{"model": {"type": "BPE"}}',
        b'{"model": {"type": "Nosuch", "vocab": {}}}',
        b'{"model": ' * 20_000,
        b"\xff\xfe\x00",
        b"{\xff}",
        bytes(range(256)) * 40,
        b"\x80\x04\x95cos\nsystem\n(S'touch planted'\ntR.",
    ],
)
def test_rubbish_is_a_sentence(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "(("}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"added_tokens": [{"id": 2**40}]},
    ],
)
def test_a_panic_of_the_library_is_a_sentence(change):
    """Its panics are no Exceptions; on stderr they leave their own words."""
    content = json.dumps({**json.loads(bytes_tokenizer_json()), **change})
    with pytest.raises(DataError, match="tokenizer x cannot be loaded"):
        parse_tokenizer(content.encode(), "x")


def test_a_file_or_a_vocabulary_beyond_all_measure_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    spec = json.loads(bytes_tokenizer_json())
    spec["model"]["vocab"]["A"] = 2**30
    path.write_text(json.dumps(spec))
    with pytest.raises(DataError, match=r"has [\d,]+ ids; allowed are 1 to 16,777,216"):
        load_tokenizer(path)
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="is larger than 0 MiB: not a tokenizer"):
        load_tokenizer(path)


def test_an_unknown_token_that_is_missing_is_told_when_it_is_needed():
    built = Reference(models.WordPiece({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer = parse_tokenizer(built.to_str().encode(), "x")
    with pytest.raises(DataError, match=r"tokenizer x cannot encode this text: .*UNK"):
        tokenizer.encode("b")


def test_short_texts_have_the_same_ids_before_and_after_the_fast_way_is_set_up(gpt2_folder):
    fresh = parse_tokenizer(fixed_tokenizer(str(gpt2_folder)), "gpt2")
    strings = [CHINESE, EMOJI, ODD]
    before = [ids.tolist() for ids in fresh.encode_batch(strings)]
    assert fresh._backend._fast is not None
    assert before == [ids.tolist() for ids in fresh.encode_batch(strings)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_a_sentence(tmp_path, sentencepiece_file, share):
    for name, content in (
        ("a.json", bytes_tokenizer_json().encode()),
        ("a.model", sentencepiece_file.read_bytes()),
    ):
        (tmp_path / name).write_bytes(content[: int(len(content) * share)])
        with pytest.raises(DataError):
            load_tokenizer(tmp_path / name)


def test_a_tokenizer_without_an_end_of_document_token_is_refused():
    built = Reference(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(DataError, match="no end-of-document token") as error:
        parse_tokenizer(built.to_str().encode(), "x")
    assert "<|endoftext|>" in error.value.hint


def test_a_folder_without_a_tokenizer_and_a_missing_file_are_sentences(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_tokenizer(tmp_path / "nosuch.json")


def test_a_lone_surrogate_is_a_sentence(gpt2, sentencepiece_file):
    for tokenizer in kinds(gpt2, sentencepiece_file):
        with pytest.raises(DataError, match="not valid Unicode"):
            tokenizer.encode("a\ud800b")


def test_ids_are_unsigned_and_one_array_a_text(gpt2):
    found = gpt2.encode_batch(["", "a b"])
    assert [ids.tolist() for ids in found] == [[], gpt2.encode("a b")]
    assert all(ids.dtype == np.uint32 for ids in found)


def test_the_random_strings_are_varied():
    text = "".join(random_strings(500))
    assert len({unicodedata.category(char) for char in text}) > 20


def test_a_vocabulary_has_two_to_the_24_ids_at_most():
    spec = json.loads(bytes_tokenizer_json())
    spec["model"]["vocab"]["far"] = 2**24 - 1
    assert parse_tokenizer(json.dumps(spec).encode(), "here").vocab_size == 2**24
    spec["model"]["vocab"]["far"] += 1
    with pytest.raises(DataError, match="tokenizer here has 16,777,217 ids; allowed are 1 to 16,777,216"):
        parse_tokenizer(json.dumps(spec).encode(), "here")
