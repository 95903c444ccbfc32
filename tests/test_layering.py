"""Imports walk downhill, and what needs no torch imports none."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "trace_audit"
TORCH_STACK = {"torch", "transformers", "triton", "safetensors", "accelerate", "gguf"}

# Each part of the package, and the parts it may import, itself included.
_PURE = {"__init__", "errors", "text", "config", "environment"}
_TORCH = {"__init__", "errors", "config", "kernels", "attention", "parallel", "models", "engine"}
ALLOWED = {
    "__init__": set(),
    "errors": {"__init__"},
    "text": _PURE,
    "config": _PURE,
    "environment": _PURE,
    "storage": _PURE | {"storage"},
    "diff": _PURE | {"storage", "diff"},
    "report": _PURE | {"storage", "diff", "report"},
    "kernels": _TORCH - {"attention", "parallel", "models", "engine"},
    "attention": _TORCH - {"parallel", "models", "engine"},
    "parallel": (_TORCH - {"models", "engine"}) | {"jobs"},
    "models": _TORCH - {"engine"},
    "engine": _TORCH,
    "jobs": _PURE | {"jobs"},
    "runner": _PURE | {"jobs", "runner", "audit", "parallel"},
    "selftest": _PURE | _TORCH | {"storage", "jobs", "runner", "bridge", "selftest"},
    "cli": _PURE | {"storage", "diff", "report", "jobs", "runner", "selftest", "cli"},
    # Anything else is the bridge between engine and files: tokenizer, audit and what it is made of.
    "bridge": _PURE | _TORCH | {"storage", "jobs", "tokenizer", "bridge", "audit"},
}
# Never, not even inside a function.
TORCH_FREE = ("__init__", "errors", "text", "config", "environment", "storage", "diff", "report")
# Not at import time.
LAZY = ("cli", "jobs", "runner", "tokenizer")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import statement's target and how it is reached."""

    importer: Path
    line: int
    target: str
    at_import_time: bool


def files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
    if first == "__main__":
        return "cli"
    return first if first in ALLOWED or first in LAZY else "bridge"


def part_of_target(target: str) -> str | None:
    """The part of this package that a dotted name belongs to, None for another package's."""
    names = target.split(".")
    if names[0] != PACKAGE:
        return None
    if len(names) == 1 or not _exists(names[1]):
        return "__init__"
    if names[1] == "audit":
        return "audit"
    return names[1] if names[1] in ALLOWED else "bridge"


def _exists(name: str) -> bool:
    directory = ROOT / PACKAGE
    return (directory / name).is_dir() or (directory / f"{name}.py").is_file()


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    yield from _walk(path, tree, at_import_time=True)


def _walk(path: Path, node: ast.AST, *, at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child):
            line = getattr(child, "lineno", 0)
            yield Import(importer=path, line=line, target=target, at_import_time=at_import_time)
        is_late = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        inside = at_import_time and not is_late and not is_for_types
        yield from _walk(path, child, at_import_time=inside)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        if node.module == PACKAGE:
            return [f"{PACKAGE}.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def _where(found: Import) -> str:
    return f"{found.importer.relative_to(ROOT)}:{found.line} imports {found.target}"


def uphill(imports: Iterator[Import], part: str) -> list[str]:
    allowed = ALLOWED.get(part, ALLOWED["bridge"])
    targets = ((found, part_of_target(found.target)) for found in imports)
    return [_where(f) for f, target in targets if target is not None and target not in allowed]


def of_torch(imports: Iterator[Import], part: str) -> list[str]:
    heavy = (found for found in imports if found.target.partition(".")[0] in TORCH_STACK)
    if part in TORCH_FREE:
        return [_where(found) for found in heavy]
    if part in LAZY:
        return [_where(found) for found in heavy if found.at_import_time]
    return []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_walk_downhill(path: Path) -> None:
    assert uphill(imports_of(path), part_of(path)) == []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_free_parts_do_not_name_torch(path: Path) -> None:
    assert of_torch(imports_of(path), part_of(path)) == []


@pytest.mark.parametrize(
    ("part", "statement", "said"),
    [
        ("errors", "from trace_audit.config import RunConfig", True),
        ("storage", "from trace_audit.diff.align import align", True),
        ("storage", "from trace_audit import diff", True),
        ("diff", "import trace_audit.report.terminal", True),
        ("engine", "def f():\n    from trace_audit.storage.schema import NUM_TOP", True),
        ("kernels", "from trace_audit.engine.engine import Engine", True),
        ("audit", "from trace_audit.cli.main import run", True),
        ("diff", "from trace_audit.engine.engine import Engine", True),
        ("report", "from trace_audit.diff.summary import ReportSummary", False),
        ("parallel", "from trace_audit.models.loader import load_model", True),
        ("kernels", "from trace_audit.parallel.world import World", True),
        ("models", "from trace_audit.parallel.world import World", False),
        ("engine", "from trace_audit.config import EngineConfig", False),
        ("cli", "from trace_audit import __version__", False),
    ],
)
def test_the_direction_check_sees(tmp_path: Path, part: str, statement: str, said: bool) -> None:
    assert bool(uphill(_parsed(tmp_path, statement), part)) is said


@pytest.mark.parametrize(
    ("part", "statement", "said"),
    [
        ("diff", "def f():\n    import torch", True),
        ("storage", "from safetensors import safe_open", True),
        ("cli", "import torch.cuda", True),
        ("cli", "if True:\n    import torch", True),
        ("cli", "def f():\n    import torch", False),
        ("tokenizer", "if TYPE_CHECKING:\n    from transformers import X", False),
        ("tokenizer", "from transformers import X", True),
        ("engine", "import torch", False),
    ],
)
def test_the_torch_check_sees(tmp_path: Path, part: str, statement: str, said: bool) -> None:
    assert bool(of_torch(_parsed(tmp_path, statement), part)) is said


def _parsed(tmp_path: Path, statement: str) -> Iterator[Import]:
    path = tmp_path / "module.py"
    path.write_text(statement, encoding="utf-8")
    return (dataclasses.replace(found, importer=ROOT / "x.py") for found in imports_of(path))


def _modules(parts: tuple[str, ...]) -> list[str]:
    paths = [path for path in files() if part_of(path) in parts]
    dotted = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in dotted]


def _loaded_after(statements: str) -> set[str]:
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_torch_free_parts_load_without_torch() -> None:
    names = _modules((*TORCH_FREE, *LAZY))
    assert len(names) > 10
    assert not _loaded_after(f"import {', '.join(names)}") & TORCH_STACK


def test_the_entry_loads_nothing_heavy() -> None:
    loaded = _loaded_after("import trace_audit.cli.main")
    heavy = {"numpy", "pyarrow", "pydantic", "rich", "multiprocessing", *TORCH_STACK}
    assert not loaded & heavy
