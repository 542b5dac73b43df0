"""Links from lists of URLs and from dumps of submissions."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
from collections import Counter

import pytest

from shoal.data.prepare.web.links import Links, read_links
from shoal.errors import DataError, InputError

POST = {"url": "http://example.com/a", "score": 3, "over_18": False, "is_self": False}


def links_of(*paths, **settings):
    counters = Counter()
    return list(read_links(paths, Links(**settings), counters)), counters


def dump(path, *posts):
    path.write_bytes(b"\n".join(p if isinstance(p, bytes) else json.dumps(p).encode() for p in posts) + b"\n")
    return path


def test_a_list_is_one_url_a_line_without_comments_and_blank_lines(tmp_path):
    path = tmp_path / "list"
    path.write_bytes(b"\xef\xbb\xbf# mine\n\nhttp://a.com/1\r\n  http://a.com/2  \nhttp://a.com/3#part")
    links, counters = links_of(path)
    assert links == ["http://a.com/1", "http://a.com/2", "http://a.com/3#part"]
    assert counters == {"links": 3}


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b.txt", "a/z.txt", ".hidden/x", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"http://{name.strip('.')}\n")
    assert links_of(tmp_path)[0] == ["http://a/z.txt", "http://b.txt", "http://c"]


@pytest.mark.parametrize("content", [b"http://a.com/1\nhttp://example.com/a\n", json.dumps(POST).encode()])
@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst", "plain"])
def test_compression_is_seen_from_the_first_bytes(tmp_path, kind, content):
    from backports import zstd  # of the extra `web`

    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
    path = tmp_path / "RS_2011-01"
    path.write_bytes(pack.get(kind, bytes)(content))
    assert links_of(path)[0][-1] == "http://example.com/a"


def test_a_zstandard_window_of_two_gibibytes_opens(tmp_path):
    from backports import zstd

    path = tmp_path / "RS_2019-01.zst"
    with zstd.open(path, "wb", options={zstd.CompressionParameter.window_log: 31}) as file:
        file.write(json.dumps(POST).encode() + b"\n")
    assert links_of(path)[0] == ["http://example.com/a"]


@pytest.mark.parametrize(
    ("post", "reason"),
    [
        ({**POST, "score": 2}, "low score"),
        ({**POST, "over_18": True}, "over 18"),
        ({**POST, "is_self": True}, "self post"),
        ({**POST, "url": ""}, "no URL"),
        ({**POST, "url": 5}, "no URL"),
        ({**POST, "score": None}, "no score"),
        (b'{"url": "http://a.com", "score": NaN}', "low score"),
        (b"{broken", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"url": "\xff"}', "not UTF-8"),
        (b'{"url": "' + b"a" * (5 << 20) + b'"}', "line too long"),
    ],
)
def test_a_submission_is_left_out_with_its_reason(tmp_path, post, reason):
    links, counters = links_of(dump(tmp_path / "d", POST, post, POST))
    assert links == ["http://example.com/a"] * 2
    assert counters == {"links": 2, reason: 1}


def test_the_settings_of_submissions_count(tmp_path):
    path = dump(tmp_path / "d", {**POST, "score": 0, "over_18": True})
    assert links_of(path, min_score=0, over_18=True)[0] == ["http://example.com/a"]


def test_what_the_api_escaped_is_plain_again_and_nothing_else(tmp_path):
    path = dump(tmp_path / "d", {**POST, "url": "http://a.com/?b=1&amp;copy=2&copy=3&amp;lt;"})
    assert links_of(path)[0] == ["http://a.com/?b=1&copy=2&copy=3&lt;"]


def test_a_bad_line_of_a_list_is_counted(tmp_path):
    path = tmp_path / "list"
    path.write_bytes(b"http://a.com/\xff\nhttp://a.com/\n")
    assert links_of(path) == (["http://a.com/"], {"links": 1, "not UTF-8": 1})


def test_a_file_cut_short_is_named(tmp_path):
    whole = gzip.compress(b"http://a.com/\n" * 1000)
    path = tmp_path / "list.gz"
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"list\.gz cannot be read to its end"):
        links_of(path)
    subprocess.run(["zstd", "-q", "-f", path, "-o", tmp_path / "l.zst"], check=True)
    (tmp_path / "cut.zst").write_bytes((tmp_path / "l.zst").read_bytes()[:-10])
    with pytest.raises(DataError, match=r"cut\.zst cannot be read to its end"):
        links_of(tmp_path / "cut.zst")
    (tmp_path / "bad.zst").write_bytes((tmp_path / "l.zst").read_bytes()[:6] + b"\xff" * 50)
    with pytest.raises(DataError, match=r"bad\.zst cannot be read to its end"):
        links_of(tmp_path / "bad.zst")


def test_a_line_without_end_is_an_error_and_takes_no_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    with pytest.raises(DataError, match="a line of more than 256 MiB"):
        links_of(path)


def test_nothing_in_or_nothing_left_says_why(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n# only a comment\n")
    with pytest.raises(DataError, match="there are no URLs in it"):
        links_of(empty)
    with pytest.raises(DataError, match="all 3 were left out, 2 of them because of: low score"):
        links_of(dump(tmp_path / "d", {**POST, "score": 1}, {**POST, "score": 0}, b"{"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        links_of(tmp_path / "folder")
    with pytest.raises(InputError, match="no file or folder"):
        links_of(tmp_path / "absent")
