"""URLs before they are fetched: spelling, block lists, duplicates."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from yarl import URL

from shoal.data.prepare.web.blocklists import DOMAINS, EXTENSIONS
from shoal.data.prepare.web.urls import REASONS, Seen, Urls, checker, filter_urls, normalise
from shoal.errors import ConfigError, DataError, InputError


def reason(link, **settings):
    return checker(Urls(**settings))(link)[1]


@pytest.mark.parametrize(
    ("link", "url"),
    [
        ("HTTP://Example.COM", "http://example.com/"),
        ("http://example.com:80/a", "http://example.com/a"),
        ("https://example.com:443/a", "https://example.com/a"),
        ("https://example.com:80/a", "https://example.com:80/a"),
        ("http://example.com./a", "http://example.com/a"),
        ("http://example.com/a#part", "http://example.com/a"),
        ("http://example.com/a/./b/../c", "http://example.com/a/c"),
        ("http://example.com/?", "http://example.com/"),
        ("http://example.com/a?utm_source=x&b=1&fbclid=2&UTM_Medium=y&c", "http://example.com/a?b=1&c"),
        ("http://example.com/a?b=x%26y+z&gclid=1", "http://example.com/a?b=x%26y+z"),
        ("http://bücher.example.com/ü?ü", "http://xn--bcher-kva.example.com/%C3%BC?%C3%BC"),
        ("http://Example.com/Path", "http://example.com/Path"),
        ("http://93.184.216.34:8080/a", "http://93.184.216.34:8080/a"),
        ("http://[2001:DB8::1]/a", "http://[2001:db8::1]/a"),
        ("  http://example.com/a\n", "http://example.com/a"),
    ],
)
def test_a_url_has_one_spelling(link, url):
    found = str(normalise(link, URL))
    assert found == url
    assert str(normalise(found, URL)) == url


MALFORMED = [
    "", "example.com/a", "//example.com/a", "mailto:a@example.com", "http:///a", "http://localhost/a",
    "http://exa mple.com/a", "http://example.com/a\tb", "http://example.com:99999/", "http://a..com/",
    "http://-a.com/", "http://user:pw@example.com/", "http://user@example.com/", "http://2130706433/",
    "http://1.2.3/", "http://" + "a" * 64 + ".com/", "http://example.com/" + "a" * 5000, "http://[::1/",
    "http://example.com/\ud800", "http://example.com\\@other.com/", "http://%65xample.com/", "http://256.1.1.1/",
]  # fmt: skip


@pytest.mark.parametrize("link", MALFORMED)
def test_a_malformed_url_is_left_out(link):
    assert reason(link) == "malformed"


@pytest.mark.parametrize(
    ("link", "settings", "why"),
    [
        ("ftp://example.com/a", {}, "scheme"),
        ("http://example.com/a", {"schemes": ["https"]}, "scheme"),
        ("http://a.b/", {}, "too short"),
        ("http://a.b/", {"min_length": 11}, ""),
        ("http://youtube.com/watch", {}, "blocked domain"),
        ("http://www.m.YouTube.com./watch", {}, "blocked domain"),
        ("http://notyoutube.com/watch", {}, ""),
        ("http://youtube.com.example.org/watch", {}, ""),
        ("http://youtube.com/watch", {"block_domains": ["shops"]}, ""),
        ("http://maps.google.com/a", {}, ""),
        ("http://example.com/a.PDF?b=1", {}, "blocked extension"),
        ("http://example.com/a.tar.gz", {}, "blocked extension"),
        ("http://example.com/a.pdf/page", {}, ""),
        ("http://example.com/a?file=b.pdf", {}, ""),
        ("http://example.com/pdf", {}, ""),
        ("http://example.com/.7z", {}, "blocked extension"),
        ("http://example.com/a.pdf", {"block_extensions": ["images"]}, ""),
        ("http://example.com/a.html", {}, ""),
    ],
)
def test_each_rule_has_its_reason(link, settings, why):
    assert reason(link, **settings) == why


def test_the_first_rule_that_holds_gives_the_reason():
    assert reason("ftp://youtube.com/a.pdf") == "scheme"
    assert reason("http://youtube.com/a.pdf") == "blocked domain"


def test_an_entry_blocks_its_own_suffix_and_hosts_below_it(tmp_path):
    file = tmp_path / "domains"
    file.write_text("# mine\nGoogle.com\n\nblog.example.org  # one host\nbücher.de\nfoo.github.io\n")
    check = checker(Urls(domain_files=[str(file)]))
    blocked = ["google.com", "a.google.com", "blog.example.org", "xn--bcher-kva.de", "foo.github.io"]
    assert [check(f"http://{host}/page")[1] for host in blocked] == ["blocked domain"] * 5
    kept = ["google.co.uk", "google.de", "example.org", "github.io"]
    assert [check(f"http://{host}/page")[1] for host in kept] == [""] * 4


@pytest.mark.parametrize("entry", ["google", "com", "co.uk", "http://a.com", "a.com/b", "*.a.com", "1.2.3.4"])
def test_an_entry_that_is_no_domain_is_refused_with_file_and_line(tmp_path, entry):
    file = tmp_path / "domains"
    file.write_text(f"a.com\n{entry}\n")
    with pytest.raises(DataError, match=r"domains, line 2: .* is not a domain"):
        checker(Urls(domain_files=[str(file)]))


def test_extensions_come_from_files_too(tmp_path):
    file = tmp_path / "extensions"
    file.write_text(".HTML\nphp\n")
    settings = {"extension_files": [str(file)]}
    links = ["http://a.com/x.html", "http://a.com/x.php", "http://a.com/x.asp", "http://a.com/x.pdf"]
    reasons = [reason(link, **settings) for link in links]
    assert reasons == ["blocked extension", "blocked extension", "", "blocked extension"]
    file.write_text("tar.gz\n")
    with pytest.raises(DataError, match=r"line 1: 'tar\.gz' is not an extension"):
        checker(Urls(**settings))


def test_a_list_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="absent cannot be read"):
        checker(Urls(domain_files=[str(tmp_path / "absent")]))
    (tmp_path / "latin").write_bytes(b"b\xfccher.de\n")
    with pytest.raises(DataError, match="latin is not UTF-8"):
        checker(Urls(domain_files=[str(tmp_path / "latin")]))


def test_the_built_in_lists_pass_the_rules_for_files(tmp_path):
    (tmp_path / "d").write_text("\n".join(name for names in DOMAINS.values() for name in names.split()))
    (tmp_path / "e").write_text("\n".join(name for names in EXTENSIONS.values() for name in names.split()))
    checker(Urls(domain_files=[str(tmp_path / "d")], extension_files=[str(tmp_path / "e")]))


def test_duplicates_are_those_after_normalisation_and_the_first_stays():
    counters = Counter()
    links = ["http://a.com/1?utm_source=x", "http://b.com/page", "HTTP://A.com:80/1#x", "http://b.com/page"]
    assert list(filter_urls(links, Urls(), counters)) == ["http://a.com/1", "http://b.com/page"]
    assert counters == {"urls": 4, "kept": 2, "duplicate": 2}


def test_counters_sum_to_the_total():
    counters = Counter()
    links = [*MALFORMED, "ftp://a.com/x", "http://a.b", "http://x.com/a", "http://a.com/b.png"]
    links += ["http://a.com/b"] * 3
    assert list(filter_urls(links, Urls(), counters)) == ["http://a.com/b"]
    assert counters["urls"] == len(links) == counters["kept"] + sum(counters[name] for name in REASONS)
    assert all(counters[name] for name in REASONS)


def test_nothing_in_or_nothing_left_says_why():
    with pytest.raises(DataError, match="no URLs are left in the input: there are no URLs in it"):
        list(filter_urls([], Urls(), Counter()))
    with pytest.raises(DataError, match="all 3 were left out, 2 of them because of: blocked domain"):
        list(filter_urls(["http://x.com/a", "http://x.com/b", "nothing"], Urls(), Counter()))


def test_seen_hashes_are_those_of_a_set():
    seen, expected, rng = Seen(), set(), np.random.default_rng(1)
    for _ in range(50):
        hashes = rng.integers(0, 20_000, rng.integers(1, 2000)).astype(np.uint64)
        new = seen.add(hashes)
        for value, is_new in zip(hashes.tolist(), new.tolist(), strict=True):
            assert is_new == (value not in expected)
            expected.add(value)
    assert seen.add(np.array([], np.uint64)).tolist() == []


def test_a_million_urls_take_16_bytes_each():
    seen, rng = Seen(), np.random.default_rng(1)
    for _ in range(64):
        seen.add(rng.integers(0, 1 << 63, 1 << 14).astype(np.uint64))
    assert sum(run.nbytes for run in seen._runs) == 8 << 20
    assert len(seen._runs) <= 21


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yarl", None)
    with pytest.raises(ConfigError, match="needs the package yarl"):
        checker(Urls())
