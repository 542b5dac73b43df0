"""Mutations of a source file, made by rule: a comparison, a constant, a call, the order of arguments changed.

Not mutated: what only words, types or invariants depend on (docstrings, annotations, f-strings, logging,
texts of errors, asserts), and keywords and constants that decide about time and memory alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_PAIRS: list[tuple[type, type]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
]
_PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)]
_OPERATORS: dict[type, type] = {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
_OPERATORS |= {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_UNWRAPPED = {"sorted", "reversed", "min", "max", "abs"}  # f(x, ...) becomes x
_CHAINED = {"clone", "copy", "detach"}  # x.f() becomes x
_WORDS = {"log", "print", "warn", "say", "debug", "info", "warning", "error", "exception"}
_WORDS |= {"describe", "label"}
_MINOR_KEYWORDS = {"hint", "help", "timeout", "daemon", "strict", "indent", "stacklevel", "flush", "exist_ok"}
_MINOR_KEYWORDS |= {"missing_ok", "ignore_errors", "non_blocking", "pin_memory", "name", "encoding", "copy"}
_MINOR_KEYWORDS |= {"frozen", "slots", "covariant"}
_OF_TYPES = {"isinstance", "issubclass", "cast", "getattr", "setattr", "hasattr"}  # swapped, they only raise
_MINOR_ENDINGS = ("_S", "_MS", "_BYTES", "_MB", "_CHUNK")  # of constants: times, and sizes of buffers


@dataclass(frozen=True)
class Mutation:
    """Source bytes [begin, end) of a file, and what stands there instead."""

    path: str  # below src/
    where: str  # qualified name of the function; "" outside of all
    rule: str
    line: int
    begin: int
    end: int
    old: str
    new: str
    number: int = 0  # of equal ones in the function

    @property
    def key(self) -> str:
        """Name it, whatever lines it moves to."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.path}:{self.where}: {' '.join(self.old.split())} -> {self.new}{again}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutations(path: str, source: bytes) -> list[Mutation]:
    """Return all mutations of a file, in order; each one still compiles."""
    seen: Counter[str] = Counter()
    found = []
    for mutation in _Finder(path, source).statements(ast.parse(source).body, ""):
        found.append(replace(mutation, number=seen[mutation.key]))
        seen[mutation.key] += 1
    return found


def digest_part(source: bytes, where: str) -> str:
    """Digest the code of a function by its qualified name; all of the file where it holds none of that name.

    Comments and blank lines do not count.
    """
    part: ast.AST = ast.parse(source)
    for name in filter(None, where.split(".")):
        named = [node for node in ast.walk(part) if getattr(node, "name", None) == name and node is not part]
        if not named:
            part = ast.parse(source)
            break
        part = named[0]
    return hashlib.sha256(ast.dump(part).encode()).hexdigest()[:16]


def sample(candidates: Sequence[Mutation], count: int, seed: int = 0) -> list[Mutation]:
    """Draw mutations: each file's share by what there is, rules in turn, by digest."""
    files: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in candidates:
        files[mutation.path].append(mutation)
    exact = {path: count * len(found) / max(1, len(candidates)) for path, found in files.items()}
    shares = {path: int(share) for path, share in exact.items()}
    for path in sorted(files, key=lambda path: shares[path] - exact[path])[: count - sum(shares.values())]:
        shares[path] += 1
    return [mutation for path in sorted(files) for mutation in _in_turn(files[path], seed)[: shares[path]]]


def _in_turn(found: Sequence[Mutation], seed: int) -> list[Mutation]:
    """Order a file's mutations: the first of each rule, then the second of each, by digest."""
    turn: Counter[str] = Counter()
    ordered = []
    for mutation in sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest()):
        ordered.append((turn[mutation.rule], mutation))
        turn[mutation.rule] += 1
    return [mutation for _, mutation in sorted(ordered, key=lambda pair: pair[0])]


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self._paths = b"pathlib" in source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def statements(self, body: Sequence[ast.stmt], where: str) -> Iterator[Mutation]:
        for statement in body:
            yield from self._statement(statement, where)

    def _statement(self, node: ast.stmt, where: str) -> Iterator[Mutation]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in ("__repr__", "__str__"):
                return
            inner = f"{where}.{node.name}" if where else node.name
            if not isinstance(node, ast.ClassDef):
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    yield from self._expression(default, inner)
            yield from self.statements(node.body, inner)
            return
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom) or self._is_minor(node):
            return
        if self._droppable(node):
            yield self._make("drop", node, "pass", where)
        if isinstance(node, ast.Raise):
            return
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.Constant):
            yield self._make("condition", node.test, f"not ({ast.unparse(node.test)})", where)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "targets", "target") and not isinstance(value, list):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.stmt):
                    yield from self._statement(part, where)
                elif isinstance(part, ast.ExceptHandler | ast.match_case):
                    yield from self.statements(part.body, where)
                elif isinstance(part, ast.withitem):
                    yield from self._expression(part.context_expr, where)
                elif isinstance(part, ast.expr):
                    yield from self._expression(part, where)

    def _expression(self, node: ast.AST | None, where: str) -> Iterator[Mutation]:
        if node is None or isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call):
            if _is_words(node):
                return
            yield from self._call(node, where)
        if isinstance(node, ast.keyword) and node.arg in _MINOR_KEYWORDS:
            return
        if isinstance(node, ast.Constant):
            if (new := _other(node.value)) is not None:
                yield self._make("constant", node, new, where)
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = ast.Compare(node.left, [_OPERATORS[type(node.ops[0])]()], node.comparators)
            yield self._make("comparison", node, ast.unparse(other), where)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not self._is_path(node):
            swapped = ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
            yield self._make("arithmetic", node, f"({ast.unparse(swapped)})", where)
        elif isinstance(node, ast.BoolOp):
            boolean = ast.BoolOp(_OPERATORS[type(node.op)](), node.values)
            yield self._make("condition", node, f"({ast.unparse(boolean)})", where)
        elif isinstance(node, ast.IfExp) and not isinstance(node.test, ast.Compare):
            yield self._make("condition", node.test, f"(not ({ast.unparse(node.test)}))", where)
        for part in ast.iter_child_nodes(node):
            yield from self._expression(part, where)

    def _call(self, node: ast.Call, where: str) -> Iterator[Mutation]:
        if isinstance(node.func, ast.Name) and node.func.id in _UNWRAPPED and node.args:
            if len(node.args) > 1 or node.func.id in ("sorted", "reversed", "abs"):
                yield self._make("drop", node, f"({ast.unparse(node.args[0])})", where)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _CHAINED and not node.args:
            yield self._make("drop", node, ast.unparse(node.func.value), where)
        if ast.unparse(node.func) in _OF_TYPES:
            return
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            first, second = map(ast.unparse, node.args[:2])
            if first != second and not _is_text(*node.args[:2]):
                other = ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
                yield self._make("swap", node, ast.unparse(other), where)

    def _is_path(self, node: ast.BinOp) -> bool:
        """Say whether an operator may join texts, or the parts of a path: changed, it only raises."""
        number = any(isinstance(part, ast.Constant) for part in (node.left, node.right))
        return _is_text(node) or (self._paths and isinstance(node.op, ast.Div) and not number)

    def _droppable(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call)
        if isinstance(node, ast.Assign):
            return isinstance(node.targets[0], ast.Subscript)
        return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)

    def _is_minor(self, node: ast.stmt) -> bool:
        """Say whether nothing but words, time or memory hangs on a statement."""
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Constant) or _is_words(node.value)
        if isinstance(node, ast.If):
            if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
                return True
            return not node.orelse and all(map(self._is_minor, node.body))
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        return isinstance(target, ast.Name) and (target.id.endswith(_MINOR_ENDINGS) or target.id == "__all__")

    def _make(self, rule: str, node: ast.expr | ast.stmt, new: str, where: str) -> Mutation:
        begin = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Mutation(self.path, where, rule, node.lineno, begin, end, self.source[begin:end].decode(), new)


def _other(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return repr(value * 2 if value else 1.0)
    return None


def _is_words(node: ast.expr) -> bool:
    """Say whether a call only makes text for people."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    owner = ast.unparse(node.func).partition(".")[0]
    return (
        name in _WORDS
        or name.startswith("announce")
        or owner in ("log", "warnings")
        or name.endswith(("Error", "Warning", "Refused"))
    )


def _is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for node in nodes
        for part in (node, *ast.iter_child_nodes(node))
    )
