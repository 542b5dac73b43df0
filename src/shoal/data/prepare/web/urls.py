"""URLs before they are fetched: one spelling for each, block lists, duplicates."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from shoal.data.prepare.stages.documents import StageSettings, require
from shoal.data.prepare.web.blocklists import DOMAINS, EXTENSIONS, DomainCategory, ExtensionCategory
from shoal.data.prepare.web.links import refuse_none_left
from shoal.errors import DataError, InputError

REASONS = ("malformed", "scheme", "too short", "blocked domain", "blocked extension", "duplicate")
_BATCH = 1 << 14
_MAX_URL = 4096  # characters; servers refuse longer ones
_MAX_LIST = 64 << 20  # bytes of a block list
_TRACKING = {
    "fbclid", "gclid", "gclsrc", "dclid", "msclkid", "yclid", "twclid", "igshid", "mc_cid", "mc_eid", "_ga",
    "_gl", "_hsenc", "_hsmi", "mkt_tok", "ref_src", "cmpid", "ocid", "ncid",
}  # fmt: skip
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_OUTSIDE = re.compile(r"[\x00-\x20\x7f<>\"`\\\ud800-\udfff]")  # characters that no URL may hold
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)+(?!\d+$){_LABEL}")
_ENDING = re.compile(r"\.?([a-z0-9]{1,10})")


class Urls(StageSettings):
    """Choice of URLs to fetch."""

    name: ClassVar[str] = "urls"
    block_domains: tuple[DomainCategory, ...] = get_args(DomainCategory)
    """Categories of the built-in list of domains that are left out; empty means none."""
    block_extensions: tuple[ExtensionCategory, ...] = get_args(ExtensionCategory)
    """Categories of the built-in list of file name extensions that are left out; empty means none."""
    domain_files: tuple[str, ...] = ()
    """Files with more domains to leave out, one a line. A domain stands for all hosts below it."""
    extension_files: tuple[str, ...] = ()
    """Files with more file name extensions to leave out, one a line."""
    min_length: NonNegativeInt = 12
    """Shortest URL that is kept, in characters after normalisation."""
    schemes: tuple[str, ...] = ("http", "https")
    """Schemes that are kept."""


def filter_urls(links: Iterable[str], settings: Urls, counters: Counter[str]) -> Iterator[str]:
    """Yield the URLs to fetch, normalised, in the order of their first occurrence.

    Counts `urls`, `kept`, and the others by their reason (REASONS, the first that holds), so that the parts
    sum to `urls`. Raises DataError where there is no URL, or none is left. Takes 16 bytes of memory a URL.
    """
    check, seen = checker(settings), Seen()
    links = iter(links)
    while batch := list(itertools.islice(links, _BATCH)):
        checked = [check(link) for link in batch]
        urls = [url for url, reason in checked if not reason]
        new = seen.add(np.array([xxhash.xxh3_64_intdigest(url.encode()) for url in urls], np.uint64))
        counters.update(reason for _, reason in checked if reason)
        counters.update(urls=len(batch), kept=int(new.sum()), duplicate=int((~new).sum()))
        yield from itertools.compress(urls, new)
    parts = Counter({name: counters[name] for name in ("kept", *REASONS)})
    refuse_none_left(parts, "kept", "URLs are left", "the input")


class Seen:
    """A set of 64-bit hashes as sorted arrays, each at least twice as long as the next one."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes; tell for each whether it was new, of equal ones the first."""
        unique, first = np.unique(hashes, return_index=True)
        fresh = np.ones(len(unique), bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            fresh &= run[place] != unique
        new = np.zeros(len(hashes), bool)
        new[first[fresh]] = True
        run = unique[fresh]
        while self._runs and len(run) * 2 > len(self._runs[-1]):
            run = np.concatenate([self._runs.pop(), run])
            run.sort()
        if len(run):
            self._runs.append(run)
        return new


def checker(settings: Urls) -> Callable[[str], tuple[str, str]]:
    """Return a function from a link to (normalised URL, "") or ("", reason)."""
    domains = {name for category in settings.block_domains for name in DOMAINS[category].split()}
    endings = {name for category in settings.block_extensions for name in EXTENSIONS[category].split()}
    if settings.domain_files:
        is_domain = _domain_test()
        domains.update(
            *(
                _entries(Path(file), "a domain, as in example.com", is_domain)
                for file in settings.domain_files
            )
        )
    endings.update(
        *(_entries(Path(file), "an extension, as in pdf", _as_ending) for file in settings.extension_files)
    )
    make = require("yarl").URL

    def check(link: str) -> tuple[str, str]:
        url = normalise(link, make)
        if url is None:
            return "", "malformed"
        if url.scheme not in settings.schemes:
            return "", "scheme"
        if len(str(url)) < settings.min_length:
            return "", "too short"
        if any(name in domains for name in _parents(url.raw_host)):
            return "", "blocked domain"
        if extension(url.raw_path) in endings:
            return "", "blocked extension"
        return str(url), ""

    return check


def normalise(link: str, make: Callable[..., Any]) -> Any:
    """Return the yarl.URL of a link in one spelling, None where it is malformed; `make` is yarl.URL.

    Scheme and host in lower case, international names in Punycode, without default port, fragment, tracking
    parameters and dot segments (RFC 3986, section 6.2.2).
    """
    text = link.strip()
    if len(text) > _MAX_URL or not _SCHEME.match(text) or _OUTSIDE.search(text):
        return None
    try:
        url = make(text)
        host = (url.raw_host or "").rstrip(".")
        if url.raw_user is not None or url.raw_password is not None or not is_host(host):
            return None
        kept = [part for part in url.raw_query_string.split("&") if part and not _is_tracking(part)]
        query = f"?{'&'.join(kept)}" if kept else ""
        plain = f"{url.scheme}://{url.host_port_subcomponent}{url.raw_path}{query}"
        return make(plain, encoded=True)
    except (ValueError, UnicodeError):
        return None


def is_host(host: str) -> bool:
    """Tell whether a host is an IP address, or a name with a dot."""
    if _NAME.fullmatch(host):
        return len(host) <= 253
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def extension(path: str) -> str:
    """Return what follows the last dot of a path's last segment, in lower case."""
    _, dot, ending = path.rpartition("/")[2].rpartition(".")
    return ending.lower() if dot else ""


def _is_tracking(part: str) -> bool:
    name = part.partition("=")[0].lower()
    return name in _TRACKING or name.startswith("utm_")


def _parents(host: str) -> Iterator[str]:
    """Yield a host and the domains above it."""
    while host:
        yield host
        host = host.partition(".")[2]


def _domain_test() -> Callable[[str], str | None]:
    """Return a function that tells whether an entry is a domain: it has a name and a public suffix."""
    suffixes = require("publicsuffixlist").PublicSuffixList(accept_unknown=False, only_icann=True)

    def domain(entry: str) -> str | None:
        try:
            name = entry.lower().rstrip(".").encode("idna").decode()
        except UnicodeError:
            return None
        return name if _NAME.fullmatch(name) and suffixes.is_private(name) else None

    return domain


def _as_ending(entry: str) -> str | None:
    found = _ENDING.fullmatch(entry.lower())
    return found[1] if found else None


def _entries(path: Path, what: str, read: Callable[[str], str | None]) -> Iterator[str]:
    """Yield the entries of a block list; DataError with file and line where `read` gives None."""
    try:
        if path.stat().st_size > _MAX_LIST:
            raise DataError(f"block list {path} is larger than {_MAX_LIST >> 20} MiB", hint="divide it")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(
            f"block list {path} cannot be read: {error.strerror}", hint="check its name"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"block list {path} is not UTF-8: {error}", hint="convert it") from error
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        entry = read(text)
        if entry is None:
            raise DataError(f"{path}, line {number}: {text!r} is not {what}", hint="correct or remove it")
        yield entry
