"""`shoal doctor`: run every check, print a table, and return the exit status."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.doctor import hosts, links, machine, primitives
from shoal.doctor.machine import Finding
from shoal.runtime.files import check_targets, write_json
from shoal.runtime.log import quieten_libraries, to_screen
from shoal.runtime.network import Endpoint

Matrix = dict[str, dict[str, primitives.Outcome]]


def diagnose(
    folder: Path, endpoint: Endpoint | None = None, datasets: tuple[Path, ...] = ()
) -> tuple[list[Finding], Matrix]:
    """Run every check for work in `folder`; those that need torch are left out where it does not start.

    Return the findings, and what each operation between two ranks came to on each back end and device.

    `endpoint` is where this host meets others, for the checks of several hosts.
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
        return findings, {}
    findings += [links.check_gpudirect(), links.check_gpu_paths(), links.check_copy_rate()]
    pair = machine.check_two_processes()
    between = hosts.check_hosts(endpoint, folder, data) if endpoint else []
    findings += [pair, *between]
    if pair.status != "problem":  # what keeps two processes apart would be taken for a fault of NCCL's
        meets = not between or between[0].status == "ok"
        findings.append(links.check_backend(ip_to_others=meets))
        matrix = primitives.try_all()
        findings.append(primitives.judge(matrix))
        return findings, matrix
    return findings, {}


def doctor(json_path: Path | None, endpoint: Endpoint | None = None, datasets: tuple[Path, ...] = ()) -> int:
    """Print the findings as a table, write them to `json_path` too, and return the exit status."""
    quieten_libraries()
    to_screen()
    check_targets(json_path)
    findings, matrix = diagnose(Path.cwd(), endpoint, datasets)
    table = Table("check", "")
    for heading in ("what was seen", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.check, status, escape(finding.fact), escape(finding.advice))
    console = Console()
    console.print(table)
    if matrix:
        console.print(_operations(matrix))
    if json_path is not None:
        write_json(json_path, {"findings": [asdict(finding) for finding in findings], "operations": matrix})
    return int(any(finding.status == "problem" for finding in findings))


def _operations(matrix: Matrix) -> Table:
    """Return a row for each operation between ranks, with its milliseconds, or why it has none."""
    table = Table("operation on 1 MB, two ranks")
    for place in matrix:
        table.add_column(place, justify="right")
    for operation in dict.fromkeys(name for outcomes in matrix.values() for name in outcomes):
        cells = [outcomes.get(operation, {}) for outcomes in matrix.values()]
        table.add_row(operation, *map(_cell, cells))
    return table


def _cell(outcome: primitives.Outcome) -> str:
    works = outcome.get("status") == "works"
    return f"{outcome['ms']:.1f} ms" if works else str(outcome.get("status", ""))
