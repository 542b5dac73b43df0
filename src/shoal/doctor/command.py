"""`shoal doctor`: run every check, print a table, and return the exit status."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.doctor import hosts, links, machine
from shoal.doctor.machine import Finding
from shoal.runtime.files import write_json
from shoal.runtime.log import quieten_libraries, to_screen


def diagnose(folder: Path, place: tuple[Any, ...] = (), datasets: tuple[Path, ...] = ()) -> list[Finding]:
    """Run every check for work in `folder`; those that need torch are left out where it does not start.

    `place` is where this host meets others, for the checks of several hosts: (nnodes, host, port, node).
    """
    torch_finding = machine.check_torch()
    has_torch = torch_finding.status == "ok"
    findings = [machine.check_python(), torch_finding]
    if has_torch:
        findings += [machine.check_devices(), machine.check_bf16(), machine.check_cores()]
    findings += [machine.check_memory(), machine.check_disk(folder), hosts.check_locks(folder)]
    findings += [machine.check_loopback(), machine.check_extras()]
    data = [hosts.check_dataset(path) for path in datasets]
    findings += data
    findings += [links.check_shared_memory(), links.check_memlock(), links.check_infiniband()]
    if not has_torch:
        return findings
    findings += [links.check_gpudirect(), links.check_gpu_paths(), links.check_copy_rate()]
    pair = machine.check_two_processes()
    between = hosts.check_hosts(place, folder, data) if place else []
    findings += [pair, *between]
    if pair.status != "problem":  # what keeps two processes apart would be taken for a fault of NCCL's
        meets = not between or between[0].status == "ok"
        findings.append(links.check_backend(ip_to_others=meets))
    return findings


def doctor(json_path: Path | None, place: tuple[Any, ...] = (), datasets: tuple[Path, ...] = ()) -> int:
    """Print the findings as a table, write them to `json_path` too, and return the exit status."""
    quieten_libraries()
    to_screen()
    findings = diagnose(Path.cwd(), place, datasets)
    table = Table("check", "")
    for heading in ("what was seen", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.check, status, escape(finding.fact), escape(finding.advice))
    Console().print(table)
    if json_path is not None:
        write_json(json_path, [asdict(finding) for finding in findings])
    return int(any(finding.status == "problem" for finding in findings))
