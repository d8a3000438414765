"""`import shardfn` is light and changes nothing; inside, imports point one way."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "shardfn").rglob("*.py"))
MLIR = "shardfn.graph.mlir"

# A module may import only modules of the rows above its own. A new file gets a place here.
LAYERS = (
    ("errors",),
    ("cost.chips", "extras", "paths"),
    ("cost.links",),
    ("graph.model", "graph.release", "graph.padding"),
    ("meshes", "graph.anew"),
    ("layout", "cost.hardware", "cost.collectives", "progress", "amounts", "graph.edges", "cost.kinds"),
    (
        "strategy",
        "context_keys",
        "graph.rules",
        "graph.frames",
        "graph.alike",
        "graph.simplified",
        "graph.together",
        "cost.fuser",
        "cost.delegated",
        "cost.tpu",
        "graph.tiles",
        "graph.windows",
        "graph.cases",
        "graph.mistakes",
        "graph.mlir",
    ),
    ("cost.fusion_cpu", "cost.fusion_tpu", "cost.sized"),
    ("cost.fusion",),
    (
        "graph.libtpu",
        "graph.rounds",
        "graph.moves",
        "graph.ingroup",
        "cost.cpu",
        "cost.gpu",
        "cost.loops",
        "graph.opfacts",
        "graph.xlaform",
    ),
    ("graph.dots", "graph.read"),
    ("graph.products",),
    ("graph.ways",),
    ("graph.roads",),
    (
        "cost.schedule",
        "cuts",
    ),
    ("context", "callee", "graph.shardy", "graph.classes", "cost.compute", "cost.calibrate"),
    ("cost.memory",),
    ("hlo",),
    ("graph", "cost.price", "compiled", "branches"),
    ("cost", "trace", "place"),
    ("given", "call"),
    ("decisions",),
    ("layoutrules",),
    ("layouttext",),
    ("strategyfile",),
    ("layoutfile",),
    ("planfile",),
    ("plan",),
    ("search.solver",),
    ("search.solver.labelling",),
    ("search.solver.content", "search.solver.budget"),
    ("search.solver.contract", "search.solver.eliminate", "search.solver.bound"),
    ("search.solver.memory",),
    ("search.solver.lagrange",),
    ("search.solver.local",),
    ("search.solver.branch", "search.solver.peak"),
    ("search.solver.narrow",),
    ("search.solver.solve", "search.forms", "search.grid", "search.kernels", "search.aims"),
    ("search.facts",),
    ("search.borders", "search.sums", "search.windowed", "search.scope"),
    ("search.strategies",),
    ("search.problem",),
    ("search.filters",),
    ("search.following", "search.plain", "search.levels", "search.room"),
    ("search.polish", "search.results", "search.letgo", "search.found"),
    ("search.neighbours", "search.holding", "search.ongrid", "search.told"),
    ("search.choose", "search.limits"),
    ("search.beside",),
    ("search.dynamic", "search.seeds"),
    ("search.recursive",),
    ("search.auto",),
    ("search",),
    ("rebind", "render", "comparison", "algo", "flows", "wishes"),
    ("pins", "guard", "tags", "halo", "decided", "causes"),
    ("study", "unpredicted", "tables", "priced"),
    ("findings",),
    ("make", "apply", "finalists"),
    ("sections",),
    ("report",),
    ("targets",),
    ("verify",),
    ("options",),
    ("optioncheck",),
    ("ends",),
    ("program",),
    ("entry",),
    ("sharded",),
    ("api", "layoutcheck"),
    ("cell",),
    ("",),  # shardfn/__init__.py
    (
        "train.batches",
        "train.modes",
        "train.state",
        "train.adapted",
        "train.optimizer_parallel",
        "train.fusion",
        "train.bucketed",
        "train.blocks",
        "train.trial",
    ),
    ("train.recompute", "train.reuse", "train.offload"),
    ("train.gradients",),
    ("train.schedule", "train.balance", "train.program", "train.rows", "train.tensor"),
    ("train.marks", "train.stages", "train.wire", "train.moved"),
    ("train.waits",),
    ("train.beats",),
    ("train.build", "train.described"),
    ("train.pipeline",),
    ("train.training", "train.folded"),
    ("train.drawn",),
    ("train.traffic",),
    ("train.update",),
    ("train.lay",),
    ("train.refused",),
    ("train.step",),
    ("train",),
    ("checkpoint.chunks",),
    ("checkpoint.contents", "checkpoint.tensorfiles"),
    ("checkpoint.leaves", "checkpoint.stored", "checkpoint.where"),
    ("checkpoint.arrays", "checkpoint.ties"),
    ("checkpoint.store", "checkpoint.restoring"),
    ("checkpoint.saving",),
    ("checkpoint.offline",),
    ("checkpoint.interchange", "checkpoint.mindspore"),
    ("checkpoint",),
    ("inference.weights",),
    ("inference.predict", "inference.sources"),
    ("inference.targets", "inference.matching"),
    ("inference.loading",),
    ("inference",),
    ("data.sources", "data.strategy", "data.tiff"),
    ("data.order", "data.pieces"),
    ("data.loader",),
    ("data",),
    ("demo", "cli_arguments", "cli_checkpoint"),
    ("cli",),
    ("__main__",),
)
RANKS = {f"shardfn.{name}".rstrip("."): rank for rank, row in enumerate(LAYERS) for name in row}

# And a package may import only these beside itself; the search knows the context's names of its modes.
MAY_IMPORT = {
    "graph": (),
    "cost": ("graph", "errors"),
    "search.solver": (),
    "search": ("search.solver", "cost", "graph", "errors", "context_keys"),
}


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources():
    return [pytest.param(name_of(path), path, id=name_of(path)) for path in FILES]


def imported(tree: ast.AST, module: str, is_package: bool, modules: frozenset[str]) -> set[str]:
    """The absolute names of what a file imports, at its top or inside functions.

    Of `from shardfn.x import y` it is `shardfn.x.y` where that is a module of ours, else `shardfn.x`.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                ours = base.partition(".")[0] == "shardfn"
                found.add(base if ours and full not in modules else full)
    return found


def wrong_way(tree: ast.AST, module: str, is_package: bool, modules: frozenset[str]) -> list[str]:
    ours = {name for name in imported(tree, module, is_package, modules) if name.partition(".")[0] == "shardfn"}
    return sorted(name for name in ours if RANKS.get(name, len(LAYERS)) >= RANKS[module])


def beyond(tree: ast.AST, module: str, is_package: bool, modules: frozenset[str]) -> list[str]:
    """What a module imports of ours that its package may not."""
    own = next((name for name in MAY_IMPORT if f"{module}.".startswith(f"shardfn.{name}.")), None)
    if own is None:
        return []
    allowed = tuple(f"shardfn.{name}." for name in (own, *MAY_IMPORT[own]))
    found = {name for name in imported(tree, module, is_package, modules) if name.partition(".")[0] == "shardfn"}
    return sorted(name for name in found if not f"{name}.".startswith(allowed))


def when_loaded(tree: ast.Module) -> ast.Module:
    """The file without its functions' bodies: what runs on import."""

    class Empty(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.Pass:
            return ast.Pass()

        visit_AsyncFunctionDef = visit_FunctionDef

    return Empty().visit(tree)


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
    assert module in RANKS, f"{module} has no place in LAYERS"
    modules = frozenset(name_of(file) for file in FILES)
    is_package = path.name == "__init__.py"
    found = wrong_way(ast.parse(path.read_text()), module, is_package, modules)
    assert found == []
    assert beyond(ast.parse(path.read_text()), module, is_package, modules) == []
    assert wrong_way(when_loaded(ast.parse(path.read_text())), module, is_package, modules) == []


@pytest.mark.parametrize(("module", "path"), sources())
def test_no_private_jax_and_one_door_to_mlir(module, path):
    text = path.read_text()
    names = imported(ast.parse(text), module, path.name == "__init__.py", frozenset())
    assert "jax._src" not in text
    assert not any(name.startswith(("jax._src", "jaxlib")) for name in names)
    if module != MLIR:
        assert "jax.extend.mlir" not in text
        assert not any(name.startswith("jax.extend.mlir") for name in names)


@pytest.mark.parametrize(("module", "path"), sources())
def test_nothing_writes_the_environment_or_flags(module, path):
    assert environment_writes(ast.parse(path.read_text())) == []


MODULES = frozenset(
    {"shardfn", "shardfn.api", "shardfn.errors", "shardfn.graph", "shardfn.graph.model", "shardfn.plan"}
)


@pytest.mark.parametrize(
    ("module", "code", "wrong"),
    [
        ("shardfn.plan", "import shardfn.api", ["shardfn.api"]),
        ("shardfn.plan", "from shardfn.api import shard", ["shardfn.api"]),
        ("shardfn.plan", "from shardfn import api, errors", ["shardfn.api"]),
        ("shardfn.plan", "def f():\n  from . import api", ["shardfn.api"]),
        ("shardfn.plan", "from shardfn import Layout", ["shardfn"]),
        ("shardfn.graph.model", "from ..plan import Plan", ["shardfn.plan"]),
        ("shardfn.graph.model", "from shardfn.nowhere import x", ["shardfn.nowhere"]),
        ("shardfn.plan", "from .graph import model\nfrom .errors import fail\nimport jax", []),
    ],
)
def test_the_direction_check_sees(module, code, wrong):
    modules = MODULES | {"shardfn.nowhere"}
    assert wrong_way(ast.parse(code), module, False, modules) == wrong


@pytest.mark.parametrize(
    ("module", "code", "wrong"),
    [
        ("shardfn.graph.model", "from shardfn.errors import fail\nimport jax", ["shardfn.errors"]),
        ("shardfn.graph.model", "from shardfn.graph import read", []),
        ("shardfn.cost.price", "from shardfn import errors, plan", ["shardfn.plan"]),
        ("shardfn.search.solver.solve", "from shardfn.search.problem import Problem", ["shardfn.search.problem"]),
        ("shardfn.search.choose", "from shardfn.search.solver.solve import solve\nfrom shardfn.errors import fail", []),
        ("shardfn.search.choose", "def f():\n  import shardfn.plan", ["shardfn.plan"]),
        ("shardfn.plan", "import shardfn.search", []),
    ],
)
def test_the_packages_check_sees(module, code, wrong):
    modules = MODULES | {"shardfn.graph.read", "shardfn.search.problem", "shardfn.search.solver.solve"}
    assert beyond(ast.parse(code), module, False, modules) == wrong


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("os.environ['A'] = '1'", 1),
        ("del os.environ['A']", 1),
        ("os.environ |= {}", 1),
        ("os.environ.setdefault('A', '1')", 1),
        ("os.putenv('A', '1')", 1),
        ("jax.config.update('jax_enable_x64', True)", 1),
        ("os.environ.get('A'); os.environ['A']; dict(os.environ); {**os.environ}; settings.update(a=1)", 0),
    ],
)
def test_the_environment_check_sees(code, count):
    assert len(environment_writes(ast.parse(code))) == count


def fresh(code: str) -> subprocess.CompletedProcess:
    """Run `code` in a new process of this interpreter, without the tests' virtual devices."""
    keep = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=keep, capture_output=True, text=True, timeout=120)


# The number of CPU devices can only be set while no backend has started.
NO_BACKEND = """
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


@pytest.mark.parametrize(
    "package", ["shardfn", "shardfn.cost", "shardfn.graph", "shardfn.search", "shardfn.search.solver"]
)
def test_a_package_s_map_names_its_modules(package):
    """Each stands in the docstring of its package, as `name`."""
    folder = ROOT.joinpath(*package.split("."))
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name for name in names if f"`{name}`" not in said} == set()


def test_import_changes_nothing():
    done = fresh(f"""
import os, sys, jax, numpy, rich
environ, flags = dict(os.environ), dict(jax.config.values)
import shardfn
assert dict(os.environ) == environ
assert dict(jax.config.values) == flags
extras = {{"flax", "equinox", "orbax", "tensorstore", "grain", "ray", "optax", "IPython"}}
assert not extras & set(sys.modules), extras & set(sys.modules)
{NO_BACKEND}""")
    assert done.returncode == 0, done.stderr


def test_the_backend_check_sees():
    done = fresh(f"import jax; jax.devices(){NO_BACKEND}")
    assert done.returncode != 0
    assert "backend" in done.stderr
