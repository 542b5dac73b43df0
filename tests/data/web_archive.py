"""WARC records, written by hand: also those that no library would write."""

from __future__ import annotations


def record(kind, url, content, content_type="application/http; msgtype=response"):
    """Return one record."""
    lines = ["WARC/1.1", f"WARC-Type: {kind}", f"WARC-Target-URI: {url}", "WARC-Date: 2024-05-06T07:08:09Z"]
    lines += [f"WARC-Record-ID: <urn:uuid:{url}>", f"Content-Type: {content_type}"]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}\r\n\r\n"]).encode() + content + b"\r\n\r\n"


def response(url, body, content_type="text/html; charset=utf-8", *headers, status=200, end="\r\n"):
    """Return the record of an HTTP response."""
    lines = [
        f"HTTP/1.1 {status} A word",
        *([f"Content-Type: {content_type}"] if content_type else []),
        *headers,
    ]
    return record("response", url, end.join([*lines, "", ""]).encode() + body)
