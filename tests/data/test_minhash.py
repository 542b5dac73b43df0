"""Signatures of documents, against plain Python, the formula of banding, and datasketch."""

import itertools
import random
import re

import numpy as np
import pyarrow as pa
import pytest

from shoal.data.prepare.dedup.minhash import MinHashes, Shingler, Signer, band_hashes
from shoal.data.prepare.dedup.settings import DedupSettings, candidate_probability, check_signatures
from shoal.data.prepare.dedup.verify import jaccard
from shoal.errors import DataError
from tests.data.narrow import SENTENCES, near, texts


def words_of(text):
    """Return the words of a text as the documentation defines them."""
    return re.findall(r"[a-z0-9_\u0080-\U0010ffff]+", text.lower())


def characters_of(text):
    return list("".join(text.split()).lower())


def ngrams(units):
    """Return the 5-grams of a list; one short one where it has fewer."""
    return [tuple(units[at : at + 5]) for at in range(max(len(units) - 4, min(len(units), 1)))]


def shingle_lists(values, kind="auto"):
    shingles, bounds = Shingler(kind).shingles(texts(values))
    return [shingles[first:last].tolist() for first, last in itertools.pairwise(bounds)]


def random_text(rng, alphabet="aB3_é字 \n\t.,(-\u3000𠀀", length=300):
    return "".join(rng.choices(alphabet, k=rng.randrange(length)))


@pytest.mark.parametrize(("kind", "units"), [("words", words_of), ("characters", characters_of)])
def test_shingles_are_those_of_plain_python(kind, units):
    rng = random.Random(0)
    values = [random_text(rng) for _ in range(300)] + [
        "",
        " ",
        "one",
        "a b c d",
        "a b c d e",
        "A B C D E",
        ".",
    ]
    values += ["x" * 100_000 + " y " + "z" * 40_000, "word " * 20_000]  # longer than a piece
    known = {}
    for value, found in zip(values, shingle_lists(values, kind), strict=True):
        wanted = ngrams(units(value))
        assert len(found) == len(wanted), value[:80]
        for shingle, ngram in zip(found, wanted, strict=True):
            assert known.setdefault(ngram, shingle) == shingle
    assert len(set(known.values())) == len(known) > 10_000


@pytest.mark.parametrize(
    ("language", "units"), [(name, characters_of) for name in SENTENCES if name != "english"]
)
def test_scripts_without_spaces_are_cut_into_characters(language, units):
    text = SENTENCES[language]
    assert [len(one) for one in shingle_lists([text])] == [len(ngrams(units(text)))]


@pytest.mark.parametrize(
    "text", [SENTENCES["english"], "Привет мир как у тебя дела", "한국어 는 띄어쓰기 를 합니다 그래서 단어"]
)
def test_scripts_with_spaces_are_cut_into_words(text):
    assert [len(one) for one in shingle_lists([text + " 字"])] == [len(words_of(text + " 字")) - 4]


def test_a_row_does_not_depend_on_its_neighbours():
    rng = random.Random(1)
    values = [random_text(rng, length=4000) for _ in range(60)] + [None, "", *SENTENCES.values()]
    rng.shuffle(values)
    signer = Signer(DedupSettings(paragraphs=True, min_chars=10))
    together = signer.sign(texts(values)).to_pylist()
    assert together == [signer.sign(texts([value])).to_pylist()[0] for value in values]
    sliced = signer.sign(texts(["in front", *values, "behind"]).slice(1, len(values)))
    assert together == sliced.to_pylist()
    assert [row["shingles"] for row, value in zip(together, values, strict=True) if not value] == [0, 0]
    assert all(row["bands"] == [0] * 14 and row["exact"] is None for row in together if not row["shingles"])


def test_minimums_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    bounds = np.array([0, 3, 3, 1500, 1501, 6000, 6000])  # empty texts, and texts over several blocks
    shingles = rng.integers(0, 1 << 64, bounds[-1], np.uint64)
    hashes = MinHashes(12, seed=3)
    found = hashes.minima(shingles, bounds)
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        for number in range(12):
            a, b = int(hashes._a[number, 0]), int(hashes._b[number, 0])
            values = [(a * (int(x) % 2**32) + b) % 2**32 for x in shingles[first:last]]
            assert found[row, number] == min(values, default=2**32 - 1)
    assert (MinHashes(12, seed=4).minima(shingles, bounds) != found)[[0, 2, 3, 4]].all()


def pairs_of(similarity, number, rng, words=200):
    """Return documents 2i and 2i + 1 that have this similarity, and no other pair has any."""
    values = []
    for _ in range(number):
        base = [f"w{rng.randrange(10**6)}" for _ in range(words)]
        values += [" ".join(base), " ".join(near(base, similarity, rng, "x"))]
    return values


def similarities(values):
    sets = [np.unique(one) for one in map(np.array, shingle_lists(values))]
    return np.array([jaccard(a, b) for a, b in zip(sets[::2], sets[1::2], strict=True)])


@pytest.mark.parametrize("similarity", [0.95, 0.8, 0.5, 0.2])
def test_the_estimate_is_unbiased(similarity):
    values = pairs_of(similarity, 400, random.Random(2))
    minima = MinHashes(112, seed=0).minima(*Shingler().shingles(texts(values)))
    estimated = (minima[::2] == minima[1::2]).mean(axis=1)
    exact = similarities(values)
    spread = np.sqrt((exact * (1 - exact)).mean() / 112)
    assert abs((estimated - exact).mean()) < 4 * spread / np.sqrt(len(exact))
    assert 0.8 * spread < (estimated - exact).std() < 1.2 * spread  # as independent hashes would have it


def share_a_band(values):
    signed = Signer(DedupSettings()).sign(texts(values))
    bands = signed.column("bands").flatten().to_numpy().reshape(len(values), -1)
    return (bands[::2] == bands[1::2]).any(axis=1)


@pytest.mark.parametrize("similarity", [0.9, 0.8, 0.7, 0.5])
def test_candidates_are_those_of_datasketch_to_sampling_noise(similarity):
    from datasketch import MinHash, MinHashLSH

    values = pairs_of(similarity, 300, random.Random(3), words=80)
    index, theirs = MinHashLSH(num_perm=112, params=(14, 8)), []
    for number, value in enumerate(values):
        minhash = MinHash(num_perm=112, seed=5)
        minhash.update_batch([" ".join(ngram).encode() for ngram in ngrams(words_of(value))])
        if number % 2:
            theirs.append(number - 1 in index.query(minhash))
        index.insert(number, minhash)
    ours = share_a_band(values)
    expected = np.mean([candidate_probability(one, 14, 8) for one in similarities(values)])
    noise = 4 * np.sqrt(expected * (1 - expected) / len(ours)) + 1e-3
    assert abs(ours.mean() - np.mean(theirs)) < np.sqrt(2) * noise
    assert abs(ours.mean() - expected) < noise


def test_probabilities_in_the_documentation():
    shown = {0.95: 1.0, 0.9: 0.9996, 0.8: 0.924, 0.7: 0.5645, 0.6: 0.211, 0.5: 0.0533, 0.3: 0.0009}
    found = {similarity: candidate_probability(similarity, 14, 8) for similarity in shown}
    assert found == pytest.approx(shown, abs=5e-4)


def test_signatures_of_other_settings_are_refused(tmp_path):
    schema = Signer(DedupSettings()).schema
    check_signatures(schema, DedupSettings(threshold=0.5, against=("x",)), "file")  # not part of a signature
    for other in ({"seed": 1}, {"shingle": "words"}, {"rows": 7}, {"paragraphs": True}):
        with pytest.raises(DataError, match="file holds signatures made with"):
            check_signatures(schema, DedupSettings(**other), "file")
    with pytest.raises(DataError, match="settings none"):
        check_signatures(pa.schema([]), DedupSettings(), "file")


def test_hostile_texts_have_a_signature():
    values = ["a" * 10_000_000, "a " * 1_000_000, "", "word", "\0\0\0", "字" * 1_000_000, "\n" * 100_000]
    rows = Signer(DedupSettings()).sign(texts(values)).to_pylist()
    assert [row["shingles"] for row in rows] == [1, 999_996, 0, 1, 0, 999_996, 0]


def test_bands_of_other_rows_differ():
    minima = np.array([[1, 2, 3, 4], [1, 2, 4, 3], [2, 1, 3, 4]], np.uint32)
    bands = band_hashes(minima, 2)
    assert bands[0, 0] == bands[1, 0] != bands[2, 0]
    assert bands[0, 1] == bands[2, 1] != bands[1, 1]
