"""`python -m tools.mutate` on a package of a few lines: what is noticed, what is not, what hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.mutate.rules import mutations, sample

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""Toy."""

import subprocess
import sys


def larger(a: int, b: int) -> int:
    """Return the larger one."""
    if a > b:
        return a
    return b


def rounds(count: int) -> int:
    done = 0
    while done < count:
        done += 1
    return done


def elsewhere() -> int:
    program = "import toy.calc; print(toy.calc.answer())"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def answer() -> int:
    return 42


def unseen(a: int) -> int:
    if a == 7:
        raise ValueError(f"{a} is not allowed")
    return a
'''
TESTS = """from toy import calc


def test_larger():
    assert calc.larger(2, 1) == 2  # of equal ones nothing is said, nor could be


def test_rounds():
    assert calc.rounds(3) == 3


def test_elsewhere():
    assert calc.elsewhere() == 42
"""
GROUPS = """package = "toy"
[toy]
modules = ["toy/*.py"]
tests = ["tests/test_*.py"]
[equivalent]
"toy/calc.py:larger: a > b -> a >= b" = "equal ones are the same"
"""


@pytest.fixture
def toy(tmp_path):
    for name, text in {
        "src/toy/__init__.py": "",
        "src/toy/calc.py": SOURCE,
        "tests/test_calc.py": TESTS,
        "tools/mutate/groups.toml": GROUPS,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(toy, *words):
    command = [sys.executable, "-m", "tools.mutate", "--root", toy, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert not done.stderr, done.stderr
    return done


def record_of(toy):
    return json.loads((toy / "benchmarks/records/mutate.json").read_text())


@pytest.mark.proof
def test_what_tests_notice_is_killed_and_the_rest_is_named(toy):
    done = run(toy, "--patience", "5")
    record = record_of(toy)
    status = {key.partition(":")[2]: result["status"] for key, result in record["results"].items()}
    assert status["answer: 42 -> 43"] == "killed"  # seen by another process alone
    assert status["rounds: done += 1 -> pass"] == "time-out"
    assert status["unseen: a == 7 -> a != 7"] == "survived"
    assert "larger: a > b -> a >= b" not in status
    assert "unseen: 7 -> 8" in done.stdout.rpartition("toy:")[2]
    assert done.returncode == 1  # below the mark
    assert record["complete"]
    assert record["groups"]["toy"]["judged"] == len(status)

    again = run(toy)
    assert "[toy" not in again.stdout  # all is known
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]

    tests = toy / "tests" / "test_calc.py"
    tests.write_text(TESTS + "\n\ndef test_unseen():\n    assert calc.unseen(8) == 8\n")
    better = run(toy)
    assert "test_unseen" in better.stdout  # what survived is tried with the new test
    assert "answer" not in better.stdout  # what was killed is not tried again


@pytest.mark.proof
def test_a_part_of_a_run_is_recorded_and_a_result_goes_with_its_function_and_its_test(toy):
    """Also what is judged counts alone, and what was not asked for stays."""
    code, test = toy / "src/toy/more.py", toy / "tests/test_more.py"
    code.write_text("def half(a: int) -> int:\n    return a // 2\n")
    test.write_text("from toy import more\n\n\ndef test_half():\n    assert more.half(8) == 4\n")
    assert run(toy, "--only", "more").returncode == 0
    first = record_of(toy)
    counts = first["groups"]["toy"]
    assert not first["complete"]
    assert (counts["judged"], counts["killed"], counts["share"]) == (2, 2, 1.0)
    assert counts["mutations"] > 2

    def judged() -> str:
        return run(toy, "--survivors").stdout.partition(" judged")[0]

    code.write_text("class Other:\n    pass\n\n\ndef half(a: int) -> int:\n    return a // 2  # even\n")
    assert judged() == "toy: 2 killed of 2"
    kept = test.read_text()
    test.write_text(kept.replace("== 4", "> 0"))
    assert judged() == "toy: 0 killed of 0"
    test.write_text(kept)
    code.write_text("def half(a: int) -> int:\n    return int(a // 2)\n")
    assert judged() == "toy: 0 killed of 0"


def test_words_types_and_invariants_are_not_mutated():
    source = b'''"""Text of 1."""
from shoal.runtime.log import log
LIMIT_S = 5.0

def f(a: int = 3) -> "int > 2":
    """More than 1."""
    log.info(f"{a + 1} > 2", 1)
    assert a > 2, 4
    if a > 2:
        log.warning("over 2")
    if a:
        raise ValueError("over 9", 9)
    return g(a, b, timeout=5)
'''
    assert [m.key.partition(": ")[2] for m in mutations("m.py", source)] == [
        "3 -> 4",
        "a -> not (a)",
        "raise ValueError('over 9', 9) -> pass".replace("'", '"'),
        "g(a, b, timeout=5) -> g(b, a, timeout=5)",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return a < b", "return a <= b"),
        ("return sorted(a)", "return (a)"),
        ("return min(a, b)", "return (a)"),
        ("return a.clone()", "return a"),
        ("return a + b * c", "return (a - b * c)"),
        ("return x if a else b", "return x if (not (a)) else b"),
        ("return a and b", "return (a or b)"),
        ("return a is None", "return a is not None"),
        ("return f(a, b, *c)", "return f(b, a, *c)"),
        ("a[0] = b", "pass"),
        ("f(a)", "pass"),
        ("return True", "return False"),
        ("return 0.5", "return 1.0"),
    ],
)
def test_each_rule(before, after):
    source = f"def f(a, b, c, x):\n    {before}\n".encode()
    made = [mutation.apply(source).decode() for mutation in mutations("m.py", source)]
    assert f"def f(a, b, c, x):\n    {after}\n" in made


def test_every_mutant_of_the_house_compiles():
    for path in (ROOT / "src" / "shoal" / "checkpoint").glob("*.py"):
        source = path.read_bytes()
        for mutation in mutations(path.name, source):
            compile(mutation.apply(source), path.name, "exec")
            assert mutation.apply(source) != source


def test_a_sample_covers_files_and_rules_and_stays_when_lines_move():
    files = {
        f"m{i}.py": f"def f(a, b):\n    g(a + {i}, b)\n    return a < b\n".encode() * 5 for i in range(3)
    }
    drawn = sample([m for path, source in files.items() for m in mutations(path, source)], 12)
    assert Counter(mutation.path for mutation in drawn) == {"m0.py": 4, "m1.py": 4, "m2.py": 4}
    assert len({mutation.rule for mutation in drawn}) >= 4
    moved = [m for path, source in files.items() for m in mutations(path, b"\n# longer\n" + source)]
    assert [m.key for m in sample(moved, 12)] == [m.key for m in drawn]
    assert {m.key for m in sample(moved, 12, seed=1)} != {m.key for m in drawn}
