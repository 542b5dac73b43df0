"""Documents of datasets made before, decoded and signed once, so that new ones are compared with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from shoal.data.dataset import SPLITS, Dataset, open_dataset
from shoal.data.indexed import IndexedReader
from shoal.data.prepare.dedup.minhash import Signer
from shoal.data.prepare.dedup.ranges import RangeFiles, RunJobs, Say
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.engine import Check
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import counted
from shoal.runtime.files import atomic_write, digest_of

DECODE_JOB = "shoal.data.prepare.dedup.against:DecodeDataset"
_SLICE_TOKENS = 8_000_000  # of one job
_BATCH_BYTES = 500_000
_TEXT = pa.schema([("text", pa.large_string())])


class Against:
    """The old datasets of a run: their ranges in order, made where they are missing."""

    def __init__(self, folder: Path, settings: DedupSettings, run_jobs: RunJobs, say: Say) -> None:
        self.ranges: list[RangeFiles] = []
        self.digests: list[str] = []
        self.datasets: list[list[Any]] = []  # [path, number of its first document, documents]
        items, number = [], 0
        for path in settings.against:
            dataset = open_dataset(Path(path))
            about = {"dataset": dataset.fingerprint, "signature": settings.signature()}
            self.digests.append(digest_of(about))
            files = list(_slices(dataset, folder / f"against-{self.digests[-1]}"))
            self.ranges += [RangeFiles(Path(item["documents"]), Path(item["signatures"])) for item in files]
            items += [item for item in files if not Path(item["signatures"]).exists()]
            documents = sum(split.num_documents for split in dataset.splits.values())
            self.datasets.append([path, number, documents])
            number += documents
        for facts in self.datasets:
            facts[1] -= number  # the newest documents have the numbers from 0
        kept = {f"against-{digest}" for digest in self.digests}
        for other in folder.glob("against-*"):
            if other.name not in kept:
                shutil.rmtree(other)
        if items:
            say(f"decoding {counted(number, 'document')} of {counted(len(self.digests), 'dataset')}")
            for _ in run_jobs(DECODE_JOB, {"settings": settings.model_dump(mode="json")}, items):
                pass


def _slices(dataset: Dataset, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one item for DecodeDataset for each slice of each split."""
    for split in (name for name in SPLITS if name in dataset.splits):
        documents = dataset.splits[split].num_documents
        step = max(1, documents * _SLICE_TOKENS // max(dataset.splits[split].num_tokens, 1))
        for first in range(0, documents, step):
            name = f"{split}-{first:012d}"
            yield {
                "dataset": str(dataset.path),
                "split": split,
                "first": first,
                "last": min(first + step, documents),
                "documents": str(folder / f"{name}.arrow"),
                "signatures": str(folder / f"{name}.narrow.arrow"),
            }


class DecodeDataset:
    """Writes a slice of a dataset's documents as text, and their narrow rows."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._signer = Signer(DedupSettings(**spec["settings"]))

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Decode and commit documents `first` to `last` of a split."""
        reader = IndexedReader(Path(item["dataset"]) / item["split"])
        tokenizer = load_tokenizer(Path(item["dataset"]))

        def batches() -> Iterator[pa.RecordBatch]:
            texts, size = [], 0
            for number in range(item["first"], item["last"]):
                texts.append(tokenizer.decode(reader.document(number).tolist()))
                size += len(texts[-1])
                if size > _BATCH_BYTES or number == item["last"] - 1:
                    check(0)
                    yield pa.record_batch([pa.array(texts, pa.large_string())], schema=_TEXT)
                    texts, size = [], 0

        files = RangeFiles(Path(item["documents"]), Path(item["signatures"]))
        write_range(files, _TEXT, batches(), self._signer)
        return {"signatures": item["signatures"]}


def write_range(
    files: RangeFiles, schema: pa.Schema, batches: Iterable[pa.RecordBatch], signer: Signer
) -> None:
    """Write batches that have a column `text`, and their narrow rows. The narrow file comes last."""
    lz4 = pa.ipc.IpcWriteOptions(compression="lz4")
    with (
        atomic_write(files.signatures) as narrow,
        pa.ipc.new_file(narrow, signer.schema) as signatures,
        atomic_write(files.documents) as file,
        pa.ipc.new_file(file, schema, options=lz4) as documents,
    ):
        for batch in batches:
            documents.write_batch(batch)
            signatures.write_batch(signer.sign(batch.column("text")))
