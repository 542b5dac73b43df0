"""What a container or a batch system lets this process have: the limits of its control groups, v2 and v1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_OWN, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(own: Path = _OWN, root: Path = _ROOT) -> int | None:
    """Return the smallest limit, in bytes, of this process's groups and all above them; None for none."""
    limits = [_number(folder / "memory.max") for folder in _folders("", own, root)]
    limits += [_number(folder / "memory.limit_in_bytes") for folder in _folders("memory", own, root)]
    # v1 says by a number close to 2**63 that there is no limit.
    return min((limit for limit in limits if limit is not None and limit < 1 << 60), default=None)


def cpu_limit(own: Path = _OWN, root: Path = _ROOT) -> float | None:
    """Return the smallest number of cores whose time this process's groups may use; None for no limit."""
    cores = []
    for folder in _folders("", own, root):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        cores.append((_integer(quota), _integer(period)))
    for folder in _folders("cpu", own, root):
        cores.append((_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")))
    return min((quota / period for quota, period in cores if quota and period), default=None)


def _folders(controller: str, own: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups with a v1 controller ("": v2), from the inmost outwards.

    A line of /proc/self/cgroup is `number:controllers:path`. In a container without a name space for groups
    the path is the host's, and only the outermost folder may be there.
    """
    for line in _text(own).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(","):
            for mount in (root / controllers, root / controller) if controller else (root, root / "unified"):
                folder = mount / path.lstrip("/")
                yield from (at for at in (folder, *folder.parents) if at.is_relative_to(mount))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and -1: no limit


def _number(file: Path) -> int | None:
    return _integer(_text(file))
