"""`import shardfn` is light and changes nothing; inside, imports point one way."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "shardfn").rglob("*.py"))

# A package imports only itself and the packages before it.
ORDER = (
    "errors", "units", "files", "session", "render", "ir", "movement", "partition", "cost", "solver", "search", "frontend", "planning", "layoutfile", "durable", "compiled", "draw",
    "report", "runtime", "api", "halo", "experts", "train", "checkpoint", "data", "embedding", "cluster", "mindspore", "", "cli", "__main__",
)  # fmt: skip
STANDALONE = {"solver"}
"""Packages that import nothing else of the library."""

# The same inside a package: a folder imports only itself and the folders before it; "" is the package's own files.
ROOMS = {
    "search": ("problem", "labels", "engine", "moves", "generators", ""),
    "planning": ("meshes", "workarounds", "layout_rules", "inside", "call", "plan", "diagnostics", "answers", "questions", ""),
}  # fmt: skip


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = frozenset(map(name_of, FILES))


def sources():
    return [pytest.param(name_of(path), path, id=name_of(path)) for path in FILES]


def imported(tree: ast.AST, modules: frozenset[str] = MODULES) -> set[str]:
    """The absolute names of what a file imports, at its top or inside functions.

    Of `from shardfn.x import y` it is `shardfn.x.y` where that is a module of ours, else `shardfn.x`.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
    return found


def package_of(module: str) -> str:
    return module.removeprefix("shardfn").lstrip(".").partition(".")[0]


def room_of(module: str) -> str:
    """The folder of `ROOMS` that a module is in, such as `shardfn.planning.plan`; empty for others."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 2 and parts[2] in ROOMS.get(parts[1], ()) else ""


def upward(module: str, names: set[str]) -> list[str]:
    """What a module imports of packages and folders that come after its own, or at all where its package stands alone."""
    own = package_of(module)
    ours = {name for name in names if name.partition(".")[0] == "shardfn" and package_of(name) != own}
    found = {n for n in ours if own in STANDALONE or ORDER.index(package_of(n)) > ORDER.index(own)}
    if own in ROOMS:

        def floor(name: str) -> int:
            return ROOMS[own].index(room_of(name).rpartition(".")[2])

        found |= {n for n in names if n.startswith(f"shardfn.{own}") and floor(n) > floor(module)}
    return sorted(found)


def past_a_door(module: str, tree: ast.AST) -> list[str]:
    """The modules of other folders that a module imports from otherwise than through the folder's `__init__.py`."""
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return sorted(name for name in found if room_of(name) not in ("", name, room_of(module)))


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of a cycle of imports, or of what leads to one; empty where there is none."""
    left = {module: set(names) & edges.keys() - {module} for module, names in edges.items()}
    while free := [module for module, names in left.items() if not names]:
        left = {module: names.difference(free) for module, names in left.items() if module not in free}
    return sorted(left)


def environment_writes(tree: ast.AST) -> list[int]:
    """Lines that change the process's environment or JAX's global flags."""

    def is_environ(node: ast.AST) -> bool:
        return ast.unparse(node) in ("os.environ", "environ")

    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()) if is_environ(target):
                lines.append(node.lineno)
            case ast.AugAssign(target=target) if is_environ(target):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if is_environ(target):
                if name not in ("get", "copy", "items", "keys", "values"):
                    lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv")):
                lines.append(node.lineno)
            case ast.Call(func=func) if ast.unparse(func) in ("jax.config.update", "config.update"):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(("module", "path"), sources())
def test_imports_point_one_way(module, path):
    assert upward(module, imported(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(("module", "path"), sources())
def test_folders_are_entered_by_their_door(module, path):
    assert past_a_door(module, ast.parse(path.read_text())) == []


def test_every_folder_has_its_place():
    folders = {f"shardfn.{package}.{room}" for package, rooms in ROOMS.items() for room in rooms if room}
    found = {name_of(path) for package in ROOMS for path in (ROOT / "shardfn" / package).glob("*/__init__.py")}
    assert folders == found


def test_modules_import_without_a_cycle():
    assert cycle({name_of(path): imported(ast.parse(path.read_text())) for path in FILES}) == []


@pytest.mark.parametrize(("module", "path"), sources())
def test_no_private_jax_and_one_door_to_mlir(module, path):
    text = path.read_text()
    names = imported(ast.parse(text), frozenset())
    assert "jax._src" not in text
    assert not any(name.startswith(("jax._src", "jaxlib")) for name in names)
    if package_of(module) != "ir":
        assert "jax.extend.mlir" not in text
        assert not any(name.startswith("jax.extend.mlir") for name in names)


@pytest.mark.parametrize(("module", "path"), sources())
def test_nothing_writes_the_environment_or_flags(module, path):
    assert environment_writes(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("module", "code", "wrong"),
    [
        ("shardfn.planning.plan", "import shardfn.api", ["shardfn.api"]),
        ("shardfn.planning.plan", "from shardfn.api import shard", ["shardfn.api"]),
        ("shardfn.planning.plan", "from shardfn import api, errors", ["shardfn.api"]),
        ("shardfn.planning.plan", "def f():\n  from shardfn.report import report", ["shardfn.report.report"]),
        ("shardfn.planning.plan", "from shardfn import Layout", ["shardfn"]),
        ("shardfn.solver.solve", "from shardfn.errors import fail", ["shardfn.errors"]),
        ("shardfn.solver.solve", "from shardfn.solver.bound import x\nimport numpy", []),
        ("shardfn.planning.plan", "from shardfn.ir import model\nfrom shardfn.errors import fail\nimport jax", []),
        ("shardfn.planning.plan.plan", "from shardfn.planning.call import AnsweredCall", []),
        ("shardfn.planning.plan.plan", "from shardfn.planning.answers import search", ["shardfn.planning.answers"]),
        ("shardfn.search.labels.filters", "from shardfn.search import MODES", ["shardfn.search"]),
        ("shardfn.search.explanation", "from shardfn.search.generators import styles", []),
    ],
)
def test_the_direction_check_sees(module, code, wrong):
    assert upward(module, imported(ast.parse(code))) == wrong


def test_the_check_of_doors_sees():
    def seen(module: str, code: str) -> list[str]:
        return past_a_door(module, ast.parse(code))

    deep = "from shardfn.planning.plan.decisions import Decision"
    assert seen("shardfn.runtime.apply", deep) == ["shardfn.planning.plan.decisions"]
    assert seen("shardfn.planning.plan.summary", deep) == []
    assert seen("shardfn.runtime.apply", "from shardfn.planning.plan import Decision") == []


def fresh(code: str) -> subprocess.CompletedProcess:
    """Run `code` in a new process of this interpreter, without the tests' virtual devices."""
    keep = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=keep, capture_output=True, text=True, timeout=120)


# The number of CPU devices can only be set while no backend has started.
NO_BACKEND = """
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


def test_import_changes_nothing():
    done = fresh(f"""
import os, sys, jax, numpy, rich
environ, flags = dict(os.environ), dict(jax.config.values)
import shardfn
assert dict(os.environ) == environ
assert dict(jax.config.values) == flags
extras = {{"flax", "equinox", "orbax", "tensorstore", "grain", "ray", "optax", "IPython", "yaml", "safetensors",
          "google.protobuf"}}
assert not extras & set(sys.modules), extras & set(sys.modules)
{NO_BACKEND}""")
    assert done.returncode == 0, done.stderr
