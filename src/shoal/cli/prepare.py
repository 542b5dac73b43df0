"""`shoal prepare` and `shoal explain`: arguments and help only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from shoal.errors import InputError

_FLAG = Parameter(negative=())
_LIST = Parameter(show_default=False)
_INPUT = Group("Input", sort_key=1)
_CHAIN = Group("Stages for web pages and large corpora", sort_key=2)


@dataclass(frozen=True)
class _Chain:
    """Options of the stages.

    Parameters
    ----------
    web
        Extract, clean and deduplicate documents. INPUT may also be web archives (WARC) and HTML files.
    stages
        TOML file of stages and their settings, instead of the chain of --web.
    show_stages
        Print the stages with their settings, and exit. With --output: print what each stage dropped in that
        dataset, and exit.
    urls
        Files or folders of URLs to fetch: text files with one URL per line, or dumps of Reddit submissions.
    languages
        Keep only documents in these languages, as in --languages en de.
    kind
        Kind of the documents, for the stages quality and language (default: source code is detected for each
        document).
    shingle
        Unit of the 5-grams that are compared to find near-duplicates (default: chosen for each document by
        its script).
    max_memory
        Memory for finding duplicates.
    shuffle
        Shuffle the documents of each split (also without stages).
    """

    web: Annotated[bool, _FLAG] = False
    stages: Path | None = None
    show_stages: Annotated[bool, _FLAG] = False
    urls: Annotated[tuple[str, ...], _LIST] = ()
    languages: Annotated[tuple[str, ...], _LIST] = ()
    kind: Literal["auto", "text", "code"] | None = None
    shingle: Literal["auto", "words", "characters"] | None = None
    max_memory: str = "1GB"
    shuffle: Annotated[bool, _FLAG] = False

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return the settings of stages that are given here."""
        given: dict[str, dict[str, Any]] = {
            "language": {"keep": self.languages or None, "kind": self.kind},
            "quality": {"kind": self.kind},
            "dedup": {"shingle": self.shingle},
        }
        chosen = {
            stage: {k: v for k, v in values.items() if v is not None} for stage, values in given.items()
        }
        return {stage: values for stage, values in chosen.items() if values}


@dataclass(frozen=True)
class _Input:
    """Options of the input.

    Parameters
    ----------
    ext
        Suffixes of the files to read in folders, as in --ext py md rst (default: text and source code).
    text_key
        Key or column that holds the text.
    delim
        Field delimiter of CSV files (default: a comma, or a tab for .tsv).
    separator
        Text between documents in a .txt file, with \\n for a newline (default: each file is one document).
    limit
        Use only the first N documents that are not empty.
    max_rejected_share
        Fraction of invalid documents above which the command fails; rejects/ lists them.
    """

    ext: Annotated[tuple[str, ...], _LIST] = ()
    text_key: str = "text"
    delim: str | None = None
    separator: str | None = None
    limit: int | None = None
    max_rejected_share: float = 0.05


InputOptions = Annotated[_Input, Parameter(name="*", group=_INPUT)]
ChainOptions = Annotated[_Chain, Parameter(name="*", group=_CHAIN)]
_PLAIN, _NO_CHAIN = _Input(), _Chain()


def prepare(
    inputs: Annotated[tuple[str, ...], Parameter(name="INPUT", show_default=False)] = (),
    /,
    *,
    output: Path | None = None,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    split: str = "949,50,1",
    seed: int = 1234,
    validation: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    test: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    workers: int | None = None,
    runner: Literal["local", "ray"] = "local",
    json: Path | None = None,
    files: InputOptions = _PLAIN,
    chain: ChainOptions = _NO_CHAIN,
) -> None:
    """Prepare a dataset from text or labelled examples.

    Run the same command again to continue after an interruption.

    Example: shoal prepare stdlib --output datasets/stdlib --vocab-size 4096

    Example: shoal prepare 'texts/*.jsonl' --output datasets/mine --text-key body

    Example: shoal prepare mnist/ --output datasets/mnist

    Example: shoal prepare crawl.warc.gz --web --output datasets/web

    Parameters
    ----------
    inputs
        Files, folders or quoted globs. A file that you name is read whatever its suffix: JSON lines by their
        keys, CSV, TSV and Parquet by their columns, anything else as UTF-8 text. `stdlib` is the source code
        of this Python's standard library (12 MB, offline). Labelled examples: .npz files (arrays x and y, or
        x_train, y_train, x_test, y_test), a folder of MNIST IDX files or of CIFAR-10's binary version,
        `sklearn-digits`, or `random-images` (generated, for timing).
    output
        Dataset folder to create or continue. Required, except with --show-stages.
    tokenizer
        bpe, word or char (trained on the input), gpt2, bytes, a tokenizer.json, a SentencePiece .model, or a
        folder with one of these or with vocab.json and merges.txt.
    vocab_size
        Vocabulary size for a newly trained bpe or word tokenizer (default: for bpe a power of two from 512 to
        32768 with at least 3 kB of text for each id; for word at most 32768).
    split
        Weights of the train, validation and test splits. Documents are assigned to splits; with few
        documents, the token stream is divided instead.
    seed
        Random seed for the split, and for the sample that a tokenizer is trained on.
    validation
        Files for the validation split, instead of a part of INPUT.
    test
        Files for the test split, instead of a part of INPUT.
    workers
        Number of processes (default: one per core). The result does not depend on it.
    runner
        Where to run: processes on this host, or the Ray cluster at RAY_ADDRESS or on this host.
    json
        JSON file to write, with the manifest and the speed.
    """
    from shoal.data.prepare.options import PrepareOptions
    from shoal.data.prepare.run import prepare_command

    if chain.show_stages:
        from shoal.data.prepare.show import show_stages

        return show_stages(chain.stages, chain.changes(), output)
    if output is None:
        raise InputError("--output is missing", hint="name the folder of the dataset: --output datasets/mine")
    chosen = PrepareOptions(
        inputs, output, tokenizer, vocab_size, split, seed, validation=validation, test=test, workers=workers,
        runner=runner, web=chain.web, stages=chain.stages, urls=chain.urls, changes=chain.changes(),
        shuffle=chain.shuffle, max_memory=chain.max_memory, **asdict(files),
    )  # fmt: skip
    prepare_command(chosen, json)
    return None


def explain(dataset: Path, doc: str, /, *, json: Path | None = None) -> int:
    """Trace a document: the stage that dropped it and why, or its place in the token files, and its twin.

    Example: shoal explain datasets/web https://example.com/a-page

    Example: shoal explain datasets/mine texts/a.jsonl:10240

    Parameters
    ----------
    dataset
        Dataset folder.
    doc
        Number of the document in the order of the input, FILE:OFFSET, FILE with one document, or URL.
    json
        JSON file to write the result to.
    """
    from shoal.data.explain import explain as run

    return run(dataset, doc, json)
