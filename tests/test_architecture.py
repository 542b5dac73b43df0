"""The house's rules, read from the source: who imports whom, sizes, names, no work at import.

Each rule is a function from made-up or real source to a list of violations, so that each is seen to fail too.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "shoal"

# A room is a module or package; the longest name that fits a module is its room. Each row says whom it may
# import beside itself. A new room gets a row here and a line in docs/architecture.md.
BASE = {"errors", "config", "models.shape", "models.counts"}
FILES = {"runtime.files", "runtime.log"}
BELOW_TASKS = BASE | FILES | {"models", "data", "scoring"}
BELOW_TRAIN = BELOW_TASKS | {"runtime", "tasks", "gradsync", "parallel", "checkpoint"}
CORE = BELOW_TRAIN - {"data", "scoring"} | {"train", "launch"}  # what a plain run needs, beside its data
FORMULAS = {"plan.link_cost", "plan.sync_cost"}
BESIDE = CORE | {"data", "scoring", "comm", "strategies", "networks", "networks.description", "worker_pool"}
BESIDE |= FORMULAS | {"page"}
CHECKS = {"bench", "doctor", "parity", "quickstart"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(FILES, BASE | FILES),
    "runtime": BASE | FILES,
    "models": BASE,
    "page": BASE,
    "data": BASE | FILES | {"page"},
    "scoring": BASE | FILES | {"models", "data"},
    "tasks": BELOW_TASKS,
    "gradsync": BASE | FILES | {"runtime"},
    "parallel": BASE | FILES | {"runtime", "models", "gradsync"},
    "checkpoint": BASE | FILES | {"runtime"},
    "train": BELOW_TRAIN,
    "launch": BELOW_TRAIN | {"train"},
    "comm": BASE | FILES | {"gradsync"},
    "strategies": CORE | {"comm"},
    "diagnosis": BASE | FILES | {"runtime"},
    "worker_pool": BASE | FILES | {"runtime"},
    "networks": BELOW_TASKS | {"tasks"},
    "networks.description": BASE | FILES,
    "interop": BASE | FILES | {"runtime", "models", "data", "checkpoint"},
    "infer": BELOW_TRAIN | {"interop", "worker_pool"},
    **dict.fromkeys(FORMULAS, BASE | FORMULAS),
    "plan": BESIDE | {"bench"},
    **dict.fromkeys(CHECKS, BESIDE | {"infer"}),
    "cli": BESIDE | CHECKS | {"plan", "infer", "interop"},
    "notebook": BESIDE | {"infer"},
    "__main__": {"cli", "runtime"},
    "": {"notebook"},
}
# Imports against the arrows, each within a function; docs/architecture.md says why.
EXCEPTIONS: dict[str, str | tuple[str, ...]] = {
    "launch.launcher": "diagnosis.watch",
    "launch.start": "strategies.replica_groups",
    "train.saving": "interop.importing",
    "train.worker": ("diagnosis.watch", "plan.grading"),
}
MUST_NOT_LOAD_TORCH = (
    "errors",
    "config",
    "plan.activations",
    "plan.in_flight",
    "plan.link_cost",
    "plan.memory",
    "plan.sync_cost",
    "plan.weights",
    "plan.workload",
    "plan.step_time",
    "plan.calibration",
    "plan.search",
    "plan.command",
    "plan.grading",
    "plan.show",
    "plan.here",
    "models.counts",
    "networks.description",
    "runtime.files",
    "cli",
    "doctor",
)
MUST_NOT_LOAD_TORCH += ("data.dataset", "data.tokenizer", "data.prepare", "notebook", "infer.serve.render")
MAY_TOUCH_ENVIRONMENT = ("runtime", "launch", "strategies.replica_groups", "doctor", "data.prepare.engine")
MAY_TOUCH_ENVIRONMENT += ("plan.here",)  # which GPUs this process may use
MAY_TOUCH_ENVIRONMENT += ("bench.frameworks",)  # in processes of their own
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
EXTRAS = ("ray", "pyarrow", "scipy", "sentencepiece", "matplotlib", "transformers", "aiohttp", "fastwarc")
EXTRAS += ("ftfy", "protego", "publicsuffixlist", "py3langid", "resiliparse", "trafilatura")
EXTRAS += ("tensorboard", "wandb", "trackio", "fastapi", "uvicorn", "lm_eval")
NEED_EXTRAS = (
    "shoal.data.prepare",
    "shoal.infer.serve",
    "shoal.infer.harness",
    *(f"shoal.bench.frameworks.with_{name}" for name in ("cntk", "jax", "mxnet", "paddle", "tensorflow")),
)
MAX_FILE_LINES, MAX_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 500, 80, 15


parsed = cache(ast.parse)  # each source once for all rules


@cache
def modules() -> dict[str, str]:
    """Return the source of each module by its name below shoal: "", "cli", "data.prepare.engine"."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str | None:
    return max((room for room in MAY_IMPORT if is_in(module, room)), key=len, default=None)


def imported_names(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of each import; the name is empty for `import a.b`."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, "." * node.level + (node.module or ""), alias.name) for alias in node.names
            )


def imported_modules(source: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name below shoal of each of Shoal's modules that `source` imports anywhere."""
    for line, module, name in imported_names(source):
        if module.startswith("."):
            yield line, module
        elif is_in(module, "shoal"):
            below = module.removeprefix("shoal").removeprefix(".")
            submodule = f"{below}.{name}".lstrip(".")
            yield line, submodule if submodule in known else below


def wrong_arrows(module: str, source: str, known: set[str]) -> list[str]:
    """Find imports of rooms that this room may not know, relative imports, and rooms without a rule."""
    room = room_of(module)
    if room is None:
        return [f"{module}: no rule says whom it may import"]
    wrong = []
    for line, target in imported_modules(source, known):
        other = room_of(target)
        exceptions = EXCEPTIONS.get(module, ())
        exceptions = (exceptions,) if isinstance(exceptions, str) else exceptions
        excepted = any(is_in(target, one) for one in exceptions)
        allowed = is_in(target, room) or other in MAY_IMPORT[room] or excepted
        if target.startswith(".") or not allowed:
            wrong.append(f"{module}:{line} imports {target}")
    return wrong


def private_imports(module: str, source: str, known: set[str]) -> list[str]:
    """Find `_names` taken from another package of Shoal's, by import or as attribute of a module."""
    package = module.split(".")[0]
    wrong, aliases = [], {}
    for line, path, name in imported_names(source):
        if is_in(path, "shoal") and path.removeprefix("shoal.").split(".")[0] != package:
            if any(re.match("_[^_]", part) for part in (*path.split("."), name)):
                wrong.append(f"{module}:{line} imports {path}.{name}")
            if f"{path}.{name}".removeprefix("shoal.") in known:
                aliases[name] = path
    for node in ast.walk(parsed(source)):
        if (
            isinstance(node, ast.Attribute)
            and re.match("_[^_]", node.attr)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ):
            wrong.append(f"{module}:{node.lineno} reads {node.value.id}.{node.attr}")
    return wrong


def environment_uses(module: str, source: str) -> list[str]:
    """Find os.environ, os.getenv and their kin."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    wrong = []
    for node in ast.walk(parsed(source)):
        direct = (
            isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os"
        )
        taken = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        )
        if direct or taken:
            wrong.append(f"{module}:{node.lineno} touches the environment")
    return wrong


def work_at_import(module: str, source: str) -> list[str]:
    """Find top-level statements that do more than define: loops, try, with, bare calls, files read."""
    wrong = []
    for node in parsed(source).body:
        call = node.value if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) else None
        registers = module in ("cli.app", "cli.bench") and ast.unparse(node).startswith(("app.", "bench."))
        bare_call = isinstance(node, ast.Expr) and isinstance(call, ast.Call) and not registers
        reads = call is not None and re.search(
            r"\bopen\(|\.read_|subprocess|environ|socket\.", ast.unparse(call)
        )
        looks = isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING"
        if isinstance(node, ast.For | ast.While | ast.With | ast.Try) or bare_call or reads or looks:
            wrong.append(f"{module}:{node.lineno} works at import: {ast.unparse(node).splitlines()[0]}")
    return wrong


def function_lengths(module: str, source: str) -> dict[str, int]:
    """Measure each function from `def` to its last line."""
    functions = (n for n in ast.walk(parsed(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f"{module}:{f.lineno} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}


def load_report(
    names: Sequence[str], refused: Sequence[str], stop_at: Sequence[str] = (), then: Sequence[str] = ()
) -> str:
    """Import modules in turn in a new Python where some packages are absent; say which one fails first.

    `stop_at` names packages of which `names`, but not what is imported `then`, may load nothing.
    """
    script = f"""
import importlib, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def found(name, *rest):
    return None if name.split(".")[0] in {tuple(refused)!r} else find(name, *rest)
PathFinder.find_spec = staticmethod(found)
for name in {[*names, *then]!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        sys.exit(f"{{name}} does not import: {{error}}")
    if name in {names!r} and (loaded := set({tuple(stop_at)!r}) & set(sys.modules)):
        sys.exit(f"{{name}} loads {{min(loaded)}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_every_import_follows_the_order_of_the_rooms():
    known = set(modules())
    assert [w for name, source in modules().items() for w in wrong_arrows(name, source, known)] == []


def test_no_private_name_crosses_a_package():
    known = set(modules())
    assert [w for name, source in modules().items() for w in private_imports(name, source, known)] == []


def test_environment_is_touched_in_its_places_only():
    others = {n: s for n, s in modules().items() if not any(is_in(n, room) for room in MAY_TOUCH_ENVIRONMENT)}
    assert [wrong for name, source in others.items() for wrong in environment_uses(name, source)] == []


def test_no_module_works_at_import():
    assert [w for n, s in modules().items() if n != "__main__" for w in work_at_import(n, s)] == []


def test_package_files_are_empty():
    packages = set(SOURCE.rglob("__init__.py")) - {SOURCE / "__init__.py"}
    assert [path for path in packages if path.read_text().strip()] == []


def test_the_top_package_defines_its_lazy_names_alone():
    body = ast.parse((SOURCE / "__init__.py").read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    assert all(node.module.split(".")[0] in sys.stdlib_module_names for node in imports)
    defined = [getattr(node, "name", "") for node in body if node not in imports]
    assert defined == [
        "",
        "",
        "__getattr__",
        "__dir__",
        "_TrainPackage",
        "",
    ]  # docstring, __all__, ..., assignment


def test_no_module_has_a_name_that_says_nothing():
    assert [name for name in modules() if FORBIDDEN_NAMES & set(name.split("."))] == []


def test_files_stay_within_500_lines():
    lengths = {name: len(source.splitlines()) for name, source in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = {k: v for name, source in modules().items() for k, v in function_lengths(name, source).items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_FUNCTION_LINES


def test_torch_free_modules_load_no_torch():
    names = [f"shoal.{name}" for name in modules() if any(is_in(name, room) for room in MUST_NOT_LOAD_TORCH)]
    assert load_report(names, refused=("torch",), stop_at=("torch",)) == ""


def test_the_core_loads_nothing_of_the_rooms_beside_it_and_all_modules_load_without_the_extras():
    """One process without the extras loads torch: the core first, then all else."""
    names = [name for name in modules() if name != "__main__"]
    core = [f"shoal.{name}" for name in names if any(is_in(name, room) for room in CORE)]
    beside = set(MAY_IMPORT) - CORE - {"data", "scoring", "", "__main__"}
    others = [f"shoal.{name}".rstrip(".") for name in names]
    others = [name for name in others if name not in core and not any(is_in(name, r) for r in NEED_EXTRAS)]
    assert load_report(core, EXTRAS, then=others, stop_at=tuple(f"shoal.{room}" for room in beside)) == ""


KNOWN = {
    "errors",
    "runtime.files",
    "runtime.process",
    "models.counts",
    "models.decoder",
    "train.loop",
    "infer.chat",
}


@pytest.mark.parametrize(
    ("module", "source", "ok"),
    [
        ("train.loop", "from shoal.models.decoder import Decoder", True),
        ("train.loop", "from shoal.infer.chat import chat", False),
        ("train.loop", "def f():\n    from shoal.infer import chat", False),
        ("models.decoder", "from shoal.runtime.files import write_json", False),
        ("models.decoder", "from shoal.models import counts", True),
        ("models.counts", "from shoal.models.decoder import Decoder", False),
        ("data.loader", "from shoal.runtime import files", True),
        ("data.loader", "import shoal.runtime.process", False),
        ("errors", "from shoal.cli.app import app", False),
        ("checkpoint.store", "from shoal.train.loop import train", False),
        ("checkpoint.store", "from .manifest import x", False),
        ("novelty.shop", "", False),
    ],
)
def test_wrong_arrow_is_found(module, source, ok):
    assert (wrong_arrows(module, source, KNOWN) == []) is ok


@pytest.mark.parametrize(
    ("source", "ok"),
    [
        ("from shoal.train.loop import _secret", True),
        ("from shoal.runtime.files import _secret", False),
        ("from shoal.runtime import files\nfiles._secret()", False),
        ("from shoal.runtime import files\nfiles.write_json()", True),
    ],
)
def test_private_name_of_another_package_is_found(source, ok):
    assert (private_imports("train.step", source, KNOWN) == []) is ok


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os\nos.getenv('A')"]
)
def test_touch_of_the_environment_is_found(source):
    assert environment_uses("train.step", source)


@pytest.mark.parametrize(
    "source", ["print(1)", "for i in x: pass", "A = open('x').read()", "try:\n import a\nfinally: b"]
)
def test_work_at_import_is_found(source):
    assert work_at_import("train.step", source)
    assert not work_at_import("train.step", '"""Doc."""\nimport os\nA = re.compile("x")\nclass B: pass')


def test_long_function_is_measured():
    source = "def f():\n" + "    x = 1\n" * 90
    assert function_lengths("m", source) == {"m:1 f": 91}


def test_module_that_needs_a_refused_package_is_named():
    assert "json.decoder" in load_report(["json.decoder"], refused=("re", "json"))
    assert load_report(["json"], refused=(), stop_at=("re", "json")) == "json loads json"
    assert load_report(["re"], refused=(), stop_at=("json",), then=["json"]) == ""
