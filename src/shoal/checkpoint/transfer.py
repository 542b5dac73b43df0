"""A file from one rank to others, for hosts that share no folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

CHUNK_BYTES = 32 << 20


def send_file(path: Path, takers: list[int], group: dist.ProcessGroup) -> None:
    """Send a file's bytes to the ranks that call `receive_file` for it."""
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            chunk = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            for taker in takers:
                dist.send(chunk, taker, group=group)


def receive_file(path: Path, size_bytes: int, owner: int, group: dist.ProcessGroup) -> None:
    """Write what `owner` sends; a disk error is raised once all has come, as the owner does not wait."""
    failure: OSError | None = None
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        for begin in range(0, size_bytes, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size_bytes - begin), dtype=torch.uint8)
            dist.recv(chunk, owner, group=group)
            try:
                if failure is None:
                    file.write(chunk.numpy().data)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
