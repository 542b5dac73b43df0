"""`shoal prepare` from end to end: find, tokenise range by range, split, assemble, commit."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from shoal.data.dataset import MANIFEST, PAGES_DIR, SPLITS, Dataset, open_dataset, seal
from shoal.data.prepare.assemble import REJECTS_DIR, REJECTS_NAME, assemble, write_rejects
from shoal.data.prepare.chain import read_chain
from shoal.data.prepare.engine import Engine, Job, usable_cores
from shoal.data.prepare.examples import holds_examples, prepare_examples
from shoal.data.prepare.lineage import build_manifest, changes, describe_inputs, plan_key
from shoal.data.prepare.options import BYTES, CHAR, FROM_TEXT, TRAINED, PrepareOptions
from shoal.data.prepare.parse import Format
from shoal.data.prepare.plan import limit_ranges, refuse_wrong_keys
from shoal.data.prepare.progress import summary_table
from shoal.data.prepare.sources import SourceFile, find_sources, in_words, penn_treebank, refuse_changed
from shoal.data.prepare.splits import SplitPlan, plan_split
from shoal.data.prepare.steps import REPORT, Paths, Ranges, cut_ranges, form_of
from shoal.data.prepare.vocabulary import (
    FIT_BYTES,
    SAMPLE_BYTES,
    Corpus,
    SourceText,
    check_fit,
    fixed_tokenizer,
    make_vocabulary,
)
from shoal.data.prepare.work import pack_range, range_paths
from shoal.data.tokenizer import JSON_NAME, MODEL_NAME, parse_tokenizer
from shoal.data.verify import CACHE
from shoal.errors import ConfigError, DataError, InputError, StoppedError
from shoal.runtime.files import atomic_write, check_targets, disk_error, fsync, read_json, write_json

if TYPE_CHECKING:
    from shoal.data.prepare.chained import Chained

WORK_DIR = ".work"  # inside the dataset folder until it is finished
STAGES_DIR = "stages"
_LOCK_NAME = "lock"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Result = TypeVar("_Result")


def prepare(options: PrepareOptions, console: Console | None = None) -> Dataset:
    """Make the dataset folder `options.output`, or continue to, or find it made; return it opened.

    Nothing appears under its final name before all of it is there; the manifest comes last.
    """
    console = console or Console(stderr=True)
    started, options = time.monotonic(), penn_treebank(options)
    chain = read_chain(options.stages, options.changes) if options.has_chain else None
    chain = chain.resolved(console.print) if chain is not None else None
    sources, passed_over = find_sources(options, pages=chain is not None and chain.takes_pages)
    if options.urls and chain is not None and not chain.takes_pages:
        raise ConfigError(
            f"--urls gives pages, and {options.stages} has no [extract]", hint="add [extract] to it"
        )
    if passed_over:
        console.print(f"passed over in folders: {in_words(passed_over)}")
    inputs = describe_inputs(options, sources, chain)
    if (options.output / MANIFEST).exists():
        return _already_made(options.output, inputs, console)
    with _locked(options.output), _stop_on_signals():
        paths = _work_folder(options, inputs, console)
        refuse_wrong_keys(sources, Format(**form_of(options), cut=None))
        if options.tokenizer not in FROM_TEXT:
            fixed_tokenizer(options.tokenizer)  # an error comes before the work
        with Engine(paths.work, options.workers or usable_cores(), options.runner) as engine:
            if chain is None:
                made = None
                text = SourceText(sources, Format(**form_of(options), cut=None), options.seed, options.limit)
                tokenizer_path = _make_tokenizer(options, text, paths, console)
                summaries = _tokenise(options, sources, paths, engine, tokenizer_path, console)
            else:
                from shoal.data.prepare.chained import Chained

                made = Chained(chain, options, sources, paths, engine, console)
                made.fetch()
                made.read()
                made.find_duplicates()
                tokenizer_path = _make_tokenizer(options, made, paths, console)
                summaries = made.tokenise(tokenizer_path)
        dataset = _finish(options, inputs, sources, paths, tokenizer_path, summaries, made, console)
    console.print(summary_table(dataset.manifest, str(options.output), time.monotonic() - started))
    return dataset


def prepare_command(options: PrepareOptions, json_path: Path | None) -> None:
    """Run `shoal prepare`: the table goes to the screen, the figures to `json_path` where one is given."""
    started = time.monotonic()
    check_targets(json_path)
    with _stop_on_signals():
        (prepare_examples if holds_examples(options) else prepare)(options, Console())
    if json_path is not None:
        seconds = time.monotonic() - started
        manifest = read_json(options.output / MANIFEST, "dataset manifest")
        write_json(json_path, {"path": str(options.output), "seconds": seconds, "manifest": manifest})


def _already_made(output: Path, inputs: dict[str, Any], console: Console) -> Dataset:
    """Return the finished dataset if it was made from just this; refuse to replace another."""
    dataset = open_dataset(output)
    different = changes(dataset.manifest.get("inputs", {}), inputs)
    if different:
        raise InputError(
            f"{output} already holds a dataset made with other options: {'; '.join(different)}",
            hint="choose another --output, or delete that folder first",
        )
    shutil.rmtree(output / WORK_DIR, ignore_errors=True)  # left by a kill after the manifest was written
    console.print(f"{output} is up to date: same inputs, same options; nothing to do")
    return dataset


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the folder for this process alone; refuse one that holds other people's files."""
    ours = {
        CACHE,
        WORK_DIR,
        REJECTS_DIR,
        STAGES_DIR,
        PAGES_DIR,
        REPORT,
        JSON_NAME,
        MODEL_NAME,
        *_token_files(),
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in output.iterdir() if path.name not in ours)
        if foreign:
            raise InputError(
                f"{output} is not empty: it holds {foreign[0]}", hint="choose a new folder for --output"
            )
        (output / WORK_DIR).mkdir(exist_ok=True)
        lock = (output / WORK_DIR / _LOCK_NAME).open("w")
    except OSError as error:
        raise disk_error(error, output) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another `shoal prepare` is writing {output}", hint="wait for it") from error
        try:
            yield
        except BaseException:
            _forget_if_nothing_was_made(output)
            raise


def _forget_if_nothing_was_made(output: Path) -> None:
    """Leave no trace of a run that was refused before it made anything worth keeping."""
    if not any(path.is_file() and path.name != _LOCK_NAME for path in (output / WORK_DIR).rglob("*")):
        shutil.rmtree(output / WORK_DIR, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds something else: not ours to remove
            output.rmdir()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Turn a stop request into StoppedError; a second signal ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number).name)  # no Exception: nobody on the way may swallow it

    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise StoppedError(
            f"stopped by {stopped}; what is done is kept", hint="run the same command again to continue"
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _work_folder(options: PrepareOptions, inputs: dict[str, Any], console: Console) -> Paths:
    """Return the folder for these inputs and options; unfinished work on others is dropped."""
    root = options.output / WORK_DIR
    paths = Paths(options.output, root / plan_key(inputs))
    for other in root.iterdir():
        if other.is_dir() and other != paths.work:
            if any((other / "ranges").glob("*.json")):
                console.print(f"inputs or options changed: the work begun in {options.output} is dropped")
            shutil.rmtree(other)
    paths.ranges.mkdir(parents=True, exist_ok=True)
    return paths


def _make_tokenizer(options: PrepareOptions, text: Corpus, paths: Paths, console: Console) -> Path:
    """Return the tokenizer's file in the work folder; make it unless an earlier run did."""
    found = next(
        (paths.work / name for name in (JSON_NAME, MODEL_NAME) if (paths.work / name).exists()), None
    )
    if found:
        return found
    if options.tokenizer in FROM_TEXT:
        content, note = _interruptible(lambda: make_vocabulary(options, text, console.print))
        write_json(paths.vocabulary_note, note)
    else:
        content = fixed_tokenizer(options.tokenizer)
    if options.tokenizer not in (BYTES, TRAINED, CHAR):
        sample = itertools.chain.from_iterable(text.sample(SAMPLE_BYTES))
        texts = [one[:FIT_BYTES] for one in itertools.islice(sample, 64)]
        check_fit(content, options.tokenizer, texts, console.print)
    path = paths.work / (JSON_NAME if content.lstrip()[:1] == b"{" else MODEL_NAME)
    with atomic_write(path) as file:
        file.write(content)
    return path


def _tokenise(
    options: PrepareOptions,
    sources: list[SourceFile],
    paths: Paths,
    engine: Engine,
    tokenizer_path: Path,
    console: Console,
) -> list[dict[str, Any]]:
    """Read and tokenise all ranges; return their summaries, in order."""
    tokenizer = parse_tokenizer(tokenizer_path.read_bytes(), str(tokenizer_path))
    form = form_of(options)
    ranges = cut_ranges(options, sources, paths, cuttable=tokenizer.cut is not None)
    if options.limit is not None:
        ranges = limit_ranges(
            ranges, dict(enumerate(sources)), Format(**form, cut=tokenizer.cut), options.limit
        )
    spec = {"folder": str(paths.ranges.absolute()), "tokenizer": str(tokenizer_path.absolute()), "form": form}
    return Ranges(
        "tokenise",
        {work.index: pack_range(work, sources) for work in ranges},
        {work.index: work.num_bytes for work in ranges},
        {work.index: range_paths(paths.ranges, work.index)[1] for work in ranges},
    ).run(engine, Job("shoal.data.prepare.work:RangeWorker", spec), console)


def _finish(
    options: PrepareOptions,
    inputs: dict[str, Any],
    sources: list[SourceFile],
    paths: Paths,
    tokenizer_path: Path,
    summaries: list[dict[str, Any]],
    made: Chained | None,
    console: Console,
) -> Dataset:
    """Check what was counted, assemble the splits, and publish everything."""
    refuse_changed(sources)
    shutil.rmtree(paths.final, ignore_errors=True)
    paths.final.mkdir()
    write_rejects(paths.ranges, paths.final, summaries, sources)
    _refuse_bad_input(options, paths, summaries, made)
    split = _plan_split(options, summaries, console)
    tokenizer = parse_tokenizer(tokenizer_path.read_bytes(), str(tokenizer_path))
    facts = assemble(paths.ranges, paths.final, summaries, split, tokenizer.vocab_size)
    shutil.copyfile(tokenizer_path, paths.final / tokenizer_path.name)
    records = made.finish(summaries, split, facts) if made is not None else []
    manifest, stages = build_manifest(
        options, inputs, sources, summaries, split, facts, tokenizer, tokenizer_path, records
    )
    if paths.vocabulary_note.exists():
        stages["tokenise"]["settings"] |= read_json(paths.vocabulary_note, "work note")
    for name, record in stages.items():
        write_json(paths.final / STAGES_DIR / f"{name}.json", record)
    if made is not None:
        made.report(manifest)
    _publish(paths, manifest)
    return open_dataset(options.output)


def _refuse_bad_input(
    options: PrepareOptions, paths: Paths, summaries: list[dict[str, Any]], made: Chained | None
) -> None:
    """Raise DataError where there is no text, or too much of it was refused."""
    rejected = sum(s["rejected"] for s in summaries)
    documents = sum(s["documents"] for s in summaries if s["role"] == "main")
    others = ("documents", "filtered", "duplicates")
    total = rejected + sum(summary.get(name, 0) for summary in summaries for name in others)
    if documents and rejected <= options.max_rejected_share * total:
        return
    if not documents and made is not None:
        made.refuse_nothing_left()
    target = options.output / REJECTS_DIR / REJECTS_NAME
    target.parent.mkdir(exist_ok=True)
    (paths.final / REJECTS_DIR / REJECTS_NAME).replace(target)
    if not rejected:
        raise DataError(f"there is no text in {', '.join(options.inputs)}", hint="all documents are empty")
    with target.open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    where = f"{first['file']} line {first['line']}" if first["line"] else f"{first['file']}"
    raise DataError(
        f"{rejected:,} of {total:,} documents are refused ({rejected / total:.1%}), "
        f"more than --max-rejected-share {options.max_rejected_share}; the first: {where}: {first['reason']}",
        hint=f"all are listed in {target}; mend them, or run again with a larger --max-rejected-share",
    )


def _plan_split(options: PrepareOptions, summaries: list[dict[str, Any]], console: Console) -> SplitPlan:
    """Divide the main text, and say so where it is not by documents."""
    main = [s for s in summaries if s["role"] == "main"]
    documents, tokens = sum(s["documents"] for s in main), sum(s["tokens"] for s in main)
    split = plan_split(
        documents, tokens, options.shares, options.seed, options.split, shuffled=options.shuffle
    )
    if split.by == "tokens":
        console.print(
            f"too few documents ({documents:,}) for split {options.split} by documents: "
            "split by tokens, so a document may lie in two splits"
        )
    return split


def _publish(paths: Paths, manifest: dict[str, Any]) -> None:
    """Give everything its final name, the manifest last. Signals wait for these few renames."""
    names = [STAGES_DIR, REJECTS_DIR, REPORT, JSON_NAME, MODEL_NAME, *_token_files()]
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        for name in names:
            old, new = paths.output / name, paths.final / name
            if old.is_dir():
                shutil.rmtree(old)
            old.unlink(missing_ok=True)
            if new.exists():
                new.replace(old)
        fsync(paths.output)
        write_json(paths.output / MANIFEST, seal(manifest))
        shutil.rmtree(paths.output / WORK_DIR)
    except OSError as error:
        raise disk_error(error, paths.output) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _token_files() -> list[str]:
    """List the names that token files can have."""
    return [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")]


def _interruptible(work: Callable[[], _Result]) -> _Result:
    """Run long foreign code in a thread, so that a signal is heard at once."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]
    return results[0]
