"""Find the rank that blocks a job from the views of all ranks, and describe it in one sentence."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.diagnosis.views import Operation, RankView
from shoal.errors import ShoalError
from shoal.runtime.failure import Failure
from shoal.runtime.files import write_json, write_text
from shoal.runtime.flight_recorder import is_plumbing

_MAX_CLAUSES = 4
_PLURAL = {"waits in": "wait in", "is": "are", "has": "have"}
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_GUARDS = ("watch.py", "stop.py")  # Shoal's threads that block nothing
_LATER = "saving"  # group of a background thread: its operations are not in the order of a step
Frame = tuple[str, str, str]  # file, line, function


def conclude(run_dir: Path, cause: Failure | None, views: Sequence[RankView]) -> Failure:
    """Return why an attempt failed, or hangs if there is no `cause`; write records to postmortem/."""
    if cause is not None and cause.fatal and cause.rank >= 0:
        return cause  # such as bad input: no rank is at fault
    if cause is None:
        verdict = HangDiagnosis(views).judge()
        failure = Failure(min(verdict.ranks, default=0), time.time(), verdict.sentence)
    else:
        failure = _explained(cause, views)
    sentence, newline, hint = failure.sentence.partition("\n")
    try:
        folder = write_postmortem(run_dir, views, sentence)
        kept = f"stacks and last operations: {folder}"
    except ShoalError as error:  # a full disk must not prevent the verdict
        kept = f"no post-mortem: {error.message}"
    return replace(failure, sentence=f"{sentence}{newline}{hint}\n  hint: {kept}")


def _explained(cause: Failure, views: Sequence[RankView]) -> Failure:
    """Add the state of the ranks to a failure, or the disagreement that led to it."""
    alive = [replace(view, state="running" if view.state == "gone" else view.state) for view in views]
    diagnosis = HangDiagnosis(alive)
    if wrong := diagnosis.mismatch():
        detail = "" if cause.secondary else cause.detail
        return replace(cause, rank=min(wrong.ranks), sentence=wrong.sentence, detail=detail, secondary=False)
    if cause.detail or cause.secondary:  # it has a traceback, or its cause is unknown
        return cause
    text, newline, hint = cause.sentence.partition("\n")
    where = [f" in {place(view)}" for view in views if view.rank == cause.rank]
    others = diagnosis.clauses(but=[cause.rank])
    text = "; ".join(filter(None, [text + "".join(where), others]))
    return replace(cause, sentence=text + newline + hint)


def write_postmortem(run_dir: Path, views: Sequence[RankView], sentence: str) -> Path:
    """Write records (JSON), stacks (text) and the verdict; return their folder."""
    folder = run_dir / "postmortem" / time.strftime("%Y%m%d-%H%M%S")
    for view in views:
        groups = {name: channel._asdict() for name, channel in view.channels.items()}
        operations = [op._asdict() for op in view.operations]
        facts = {**asdict(view), "channels": groups, "operations": operations, "stack": None}
        write_json(folder / f"rank-{view.rank}.json", facts)
        write_text(folder / f"rank-{view.rank}.stack.txt", view.stack or f"no stack: {view.state}\n")
    write_text(folder / "verdict.txt", f"{sentence}\n")
    return folder


@dataclass(frozen=True)
class Verdict:
    """Sentence for the user, and the ranks at fault."""

    sentence: str
    ranks: tuple[int, ...]


class HangDiagnosis:
    """Finds the ranks at fault in the views of all ranks at one moment."""

    def __init__(self, views: Sequence[RankView]) -> None:
        self._views = {view.rank: view for view in sorted(views, key=lambda view: view.rank)}
        self._issued: dict[str, dict[int, int]] = defaultdict(dict)  # count by channel and rank
        self._at: dict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)  # channel, number; rank
        self._descriptions: dict[str, str] = {}
        for view in self._views.values():
            for name, channel in view.channels.items():
                self._descriptions[name] = channel.description
                for rank in self._views.keys() & set(channel.ranks):
                    self._issued[name].setdefault(rank, 0)
                self._issued[name][view.rank] = channel.seq
            for op in view.operations:
                self._at[op.channel, op.seq][view.rank] = op
        # (rank, operation): other ranks of the group have issued the operation, this rank has not
        self._lacking = [
            (rank, next(iter(self._at[name, count + 1].values())))
            for name, issued in self._issued.items()
            for rank, count in issued.items()
            if (name, count + 1) in self._at
        ]

    def judge(self) -> Verdict:
        """Return why a job makes no progress."""
        for find in (self.mismatch, self._lost, self._skipped, self._behind):
            if verdict := find():
                return verdict
        # Also: ranks issued the same number of a group from different lines of the program.
        if verdict := self._difference(lambda op: (_signature(op), op.caller, op.words)):
            return verdict
        if not any(view.waiting for view in self._views.values()):
            return Verdict(f"no rank waits for another one; {self.clauses()}", ())
        hosts = sorted({view.host for view in self._views.values()})
        between = f"between {' and '.join(hosts)}" if len(hosts) > 1 else "between them"
        text = f"all ranks issued the same operations and yet wait: look at the link {between}"
        return Verdict(f"{text}; {self.clauses()}", ())

    def mismatch(self) -> Verdict | None:
        """Find operations with the same number in a group but another name, shape or dtype."""
        return self._difference(_signature)

    def clauses(self, *, but: Collection[int] = (), at_fault: bool = False) -> str:
        """Describe all ranks except `but`, with one clause for those that do the same."""
        doing: dict[tuple[str, str], list[int]] = defaultdict(list)
        for view in self._views.values():
            if view.rank not in but:
                doing[self._doing(view, at_fault=at_fault)].append(view.rank)
        told = [self._clause(who, verb, what) for (verb, what), who in doing.items()]
        return "; ".join(told[:_MAX_CLAUSES] + ["..."] * (len(told) > _MAX_CLAUSES))

    def _clause(self, ranks: Sequence[int], verb: str, what: str) -> str:
        """Write "ranks 0-2 wait in", or "rank 3 on south is in data" if there are several hosts."""
        runs: list[list[int]] = []
        for rank in sorted(ranks):
            if not runs or rank != runs[-1][-1] + 1:
                runs.append([])
            runs[-1].append(rank)
        numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        hosts = {self._views[rank].host for rank in ranks}
        one_of_many = len(hosts) == 1 and {view.host for view in self._views.values()} != hosts
        several = len(ranks) > 1
        who = f"rank{'s' * several} {numbers}{f' on {min(hosts)}' * one_of_many}"
        return f"{who} {_PLURAL.get(verb, verb) if several else verb} {what}"

    def _doing(self, view: RankView, *, at_fault: bool) -> tuple[str, str]:
        """Return verb and object: waits in an operation that others have not issued, or is at a place."""
        if view.state != "running":
            where = {"gone": ", last seen in {}", "stopped": " by a signal in {}"}.get(view.state, "")
            said = f"{view.state}{where}".format(place(view))
            return ("has", "not begun") if view.state == "absent" else ("is", said)
        pending = next(
            (op for op in view.operations if op.seq > min(self._issued[op.channel].values())), None
        )
        if at_fault and not view.waiting:
            pending = None  # it issued that operation in advance, and does something else now
        elif pending is None and view.waiting and view.operations:
            pending = view.operations[-1]
        return ("waits in", self._spoken(pending)) if pending else ("is", f"in {place(view)}")

    def _lost(self) -> Verdict | None:
        """Find ranks whose process has ended, is stopped, or never started."""
        for state in ("gone", "stopped", "absent"):
            if lost := [rank for rank, view in self._views.items() if view.state == state]:
                return self._verdict(lost)
        return None

    def _skipped(self) -> Verdict | None:
        """Find ranks that left out an operation in which others wait, judged by their own previous step."""
        found: dict[Operation, list[int]] = defaultdict(list)
        for rank, operation in self._lacking:
            if self._went_past(self._views[rank], operation):
                found[operation].append(rank)
        if not found:
            return None
        operation = min(found, key=lambda operation: operation.time)
        return self._verdict(found[operation], "skipped", self._spoken(operation))

    def _went_past(self, view: RankView, lacked: Operation) -> bool:
        """Return whether a rank is past an operation that it did not issue.

        That is, it is in a later step, or has issued an operation that followed it in the previous step.
        """
        if self._descriptions[lacked.channel] == _LATER or view.step != lacked.step:
            return self._descriptions[lacked.channel] != _LATER and lacked.step < view.step
        last = max((op.step for op in view.operations if op.step < view.step), default=0)
        before = {name: place for place, name in enumerate(self._names(view, last).values())}
        peer = next(other for other in self._views.values() if lacked in other.operations)
        after = before.get(self._names(peer, lacked.step)[lacked], len(before))
        return any(before.get(name, -1) > after for name in self._names(view, view.step).values())

    def _names(self, view: RankView, step: int) -> dict[Operation, Any]:
        """Name the operations of a step by kind and by their number among those of the kind."""
        count: Counter[Hashable] = Counter()
        names = {}
        for op in view.operations:
            if op.step == step and self._descriptions[op.channel] != _LATER:
                what = (op.channel, _signature(op), op.caller, op.words)
                count[what] += 1
                names[op] = what, count[what]
        return names

    def _behind(self) -> Verdict | None:
        """Find ranks that did not issue what others wait for, preferably ranks that wait for none."""
        lacking = {rank for rank, _ in self._lacking}
        issued = [
            (rank, count > min(of.values())) for of in self._issued.values() for rank, count in of.items()
        ]
        ahead = {rank for rank, more in issued if more}
        free = {rank for rank in lacking if not self._views[rank].waiting}
        ranks = sorted((free - ahead) or free or (lacking - ahead))
        return self._verdict(ranks) if ranks else None

    def _difference(self, key: Callable[[Operation], Hashable]) -> Verdict | None:
        """Find the first number of a group at which operations differ by `key`, and the ranks that differ."""
        differing = [ops for ops in self._at.values() if len({key(op) for op in ops.values()}) > 1]
        if not differing:
            return None
        ops = min(differing, key=lambda ops: min(op.time for op in ops.values()))
        kinds: dict[Hashable, list[int]] = defaultdict(list)
        for rank, operation in ops.items():
            kinds[key(operation)].append(rank)
        for (odd, ranks), (_, rest) in itertools.permutations(kinds.items(), 2):
            skipped = ops[rest[0]]
            following = self._at.get((skipped.channel, skipped.seq + 1), {}).get(rest[0])
            if len(ranks) <= len(rest) and following is not None and key(following) == odd:
                text = self._clause(ranks, "skipped", self._detailed(skipped))
                return Verdict(f"{text} and issued {self._detailed(ops[ranks[0]])} instead", tuple(ranks))
        seen = Counter(key(op) for view in self._views.values() for op in view.operations)
        order = sorted(kinds.items(), key=lambda kind: (len(kind[1]), seen[kind[0]], -kind[1][0]))
        told = [self._clause(ranks, "issued", self._detailed(ops[ranks[0]])) for _, ranks in order]
        return Verdict(", where ".join(told), tuple(order[0][1]))

    def _spoken(self, op: Operation) -> str:
        """Describe an operation: "all_reduce 4711, gradient bucket 5"."""
        return self._numbered(op) + (f", {op.words}" if op.words else f" ({op.caller})")

    def _detailed(self, op: Operation) -> str:
        return f"{self._numbered(op)} of {op.tensor} ({', '.join(filter(None, [op.words, op.caller]))})"

    def _numbered(self, op: Operation) -> str:
        description = self._descriptions.get(op.channel)
        return f"{op.name} {op.seq}" + (f" in group {description}" if description else "")

    def _verdict(self, ranks: Sequence[int], verb: str = "", what: str = "") -> Verdict:
        """Return a verdict on ranks for what they do, or for a given reason, with the state of the others."""
        others = self._views.keys() - set(ranks)
        blamed = self._clause(ranks, verb, what) if verb else self.clauses(but=others, at_fault=True)
        return Verdict("; ".join(filter(None, [blamed, self.clauses(but=ranks)])), tuple(ranks))


def place(view: RankView) -> str:
    """Return where a rank is: its phase, and the innermost function outside of torch in its main thread."""
    step = f"step {view.step}" if view.step else ""
    words = [f"{view.phase} of {step}" if view.phase and step else view.phase or step]
    if frame := _own_frame(view.stack):
        words.append(f"{frame[2]} at {Path(frame[0]).name}:{frame[1]}")
    return ", ".join(filter(None, words)) or "an unknown place"


def _signature(op: Operation) -> Hashable:
    return "send and recv" if op.name in ("send", "recv") else op.name, op.tensor


def _own_frame(stack: str) -> Frame | None:
    """Return the frame to name: that of the main thread, or of a thread for which the main one waits."""
    threads: list[
        list[Frame]
    ] = []  # innermost frame first, the main thread last, as faulthandler writes them
    for line in stack.splitlines():
        if line.endswith("(most recent call first):"):
            threads.append([])
        elif threads and (found := _FRAME.fullmatch(line)):
            threads[-1].append((found[1], found[2], found[3]))
    *others, main = threads or [[]]
    order = [main]
    if main and Path(main[0][0]).name == "threading.py":
        order = [frames for frames in others if not any(Path(f[0]).name in _GUARDS for f in frames)] + order
    return next((frame for frames in order for frame in frames if not is_plumbing(frame[0])), None)
