"""`python -m shardfn demo` and `python -m shardfn explain module:function --shapes "f32[16,32]"`."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

import shardfn
from shardfn.cost.hardware import resolve
from shardfn.errors import ShardError, StrategyError, StrategyTypeError, fail
from shardfn.search import MODES

VIRTUAL_DEVICES = 8

DTYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{short}{bits}": f"{name}{bits}" for short, name in (("i", "int"), ("s", "int"), ("u", "uint"))
       for bits in (8, 16, 32, 64)},
    **{"bf16": "bfloat16", "c64": "complex64", "c128": "complex128", "pred": "bool"},
}  # fmt: skip
"""The short names of element types; NumPy's own names do as well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, or 2 where something has to be mended.

    Called without arguments, as the command itself does it, the process may start itself anew with virtual devices.

    >>> main(["explain", "jax.numpy:matmul", "--shapes", "f32[8,4]", "f32[4,2]", "--device", "tpu-v4:8",
    ...       "--in-strategy", "((4, 1), (1, 2))", "--quiet"])
    0
    """
    options = _parser().parse_args(argv)
    if argv is None:
        _start_with_devices(options.platform, max(1, getattr(options, "devices", VIRTUAL_DEVICES)))
    try:
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ShardError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shardfn", description="Shard JAX functions from integers.")
    parser.add_argument("--version", action="version", version=f"shardfn {shardfn.__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="demo | explain | calibrate")

    demo = commands.add_parser("demo", help="a small training run on 8 virtual CPU devices, with its report")
    demo.set_defaults(command=_demo, platform="cpu")

    explain = commands.add_parser(
        "explain",
        help="what sharding does to a function: layouts, collectives, memory",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Plan a function from shapes and print the report. Nothing runs, and with a target as --device "
        "no\nhardware is needed.",
        epilog='example: python -m shardfn explain jax.numpy:matmul --shapes "f32[16,32]" "f32[32,64]" \\\n'
        '           --in-strategy "((4, 1), (1, 2))" --device tpu-v5e:4x4',
    )
    explain.add_argument("function", help="module:function or file.py:function")
    arguments = explain.add_mutually_exclusive_group()
    arguments.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE",
                           help="one for each argument: f32[16,32], or for a pytree \"{'w': 'f32[4,4]'}\"")  # fmt: skip
    arguments.add_argument("--args", metavar="MODULE:FUNCTION",
                           help="a function without parameters that returns the tuple of arguments")  # fmt: skip
    explain.add_argument("--in-strategy", metavar="TUPLE", help='one entry for each argument: "((4, 1), None, AUTO)"')
    explain.add_argument("--out-strategy", metavar="TUPLE", help='one entry for each result: "((4, 2),)"')
    explain.add_argument("--parameter-plan", metavar="DICT", help="entries by path: \"{'params/w1': (1, 4)}\"")
    explain.add_argument("--device", help="CPU, GPU, TPU, or a target to plan for, such as tpu-v5e:4x4 or cpu:64")
    explain.add_argument("--level", type=int, help="what a search makes best: 0, 1 or 2")
    explain.add_argument("--search-mode", choices=sorted(MODES), help="the search for what is left open")
    explain.add_argument("--compiled", action="store_true", help="compile, and hold the prediction against it")
    explain.add_argument("--json", metavar="FILE", help="write the report's data as well; - for standard output alone")
    explain.add_argument("--html", metavar="FILE", help="write the report as a web page as well")
    explain.add_argument("--quiet", action="store_true", help="do not print the report")
    explain.set_defaults(command=_explain, platform=None)

    calibrate = commands.add_parser("calibrate", help="measure the virtual CPU devices of this machine",
                                    description="Measure what one virtual CPU device does per second while all are busy. "
                                    "Plans for CPU devices\nuse the figures where the environment variable SHARDFN_CPU "
                                    "names the saved file.")  # fmt: skip
    calibrate.add_argument("--devices", type=int, default=VIRTUAL_DEVICES, help=f"how many; {VIRTUAL_DEVICES} if left out")
    calibrate.add_argument("--save", metavar="FILE", help="write the figures, as JSON")
    calibrate.set_defaults(command=_calibrate, platform="cpu")
    return parser


def _start_with_devices(platform: str | None, devices: int = VIRTUAL_DEVICES) -> None:
    """Start this process anew with virtual CPU devices, where its environment does not say how many there are.

    XLA reads its settings when it starts, and the thread count (`NPROC`) must be at least twice the device count: JAX
    before 0.12 can wait for ever otherwise. So the environment of a new process is the place for both.
    """
    has_count = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if has_count and "NPROC" in os.environ:
        return
    environment = {"NPROC": str(4 * devices), **os.environ}
    if not has_count:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    if platform is not None:
        environment.setdefault("JAX_PLATFORMS", platform)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _demo(options: argparse.Namespace) -> None:
    from shardfn.demo import run

    if not run(show):
        raise SystemExit(1)


def _calibrate(options: argparse.Namespace) -> None:
    from shardfn.cost.calibrate import calibrate, table
    from shardfn.cost.chips import save_chip

    if options.devices < 1:
        fail(StrategyError, f"--devices {options.devices} is no number of devices", where="calibrate", fix="write 8")
    chip = calibrate(resolve("cpu", count=options.devices).devices or ())
    print(table(chip))
    if options.save:
        save_chip(chip, options.save)
        print(f"saved: plans for CPU devices use it with SHARDFN_CPU={options.save}")


def _explain(options: argparse.Namespace) -> None:
    function = _load(options.function, "function")
    arguments = _made(options.args) if options.args else tuple(map(_shapes, options.shapes))
    given = {
        name: value
        for name, value in (
            ("in_strategy", _literal(options.in_strategy, "--in-strategy")),
            ("out_strategy", _literal(options.out_strategy, "--out-strategy")),
            ("parameter_plan", _literal(options.parameter_plan, "--parameter-plan")),
            ("device", options.device),
            ("level", options.level),
            ("search_mode", options.search_mode),
        )
        if value is not None
    }
    try:
        report = shardfn.explain(function, *arguments, compiled=options.compiled, **given)
    except ShardError:
        raise
    except Exception as error:
        fail(StrategyError, f"`{options.function}` cannot be traced: {type(error).__name__}: {_first_lines(error)}",
             where=_last_line(error), fix="check that the shapes are those the function takes")  # fmt: skip
    if options.json == "-":
        print(report.to_json())
    elif options.json:
        pathlib.Path(options.json).write_text(report.to_json() + "\n", encoding="utf-8")
    if options.html:
        pathlib.Path(options.html).write_text(report.to_html() + "\n", encoding="utf-8")
    if not options.quiet and options.json != "-":
        show(report)


def show(report: shardfn.Report) -> None:
    """Print a report: in colours on a terminal, as plain text into a pipe or a file."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report.to_text(120))


# ---- what stands on the command line


def _load(name: str, what: str) -> Callable[..., Any]:
    """The object that `module:attribute` or `file.py:attribute` names."""
    module_name, colon, path = name.rpartition(":")
    if not colon or not module_name or not path:
        fail(StrategyError, f"`{name}` does not name a {what}",
             fix="write module:function, for instance jax.numpy:matmul, or file.py:function")  # fmt: skip
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(pathlib.Path(module_name).stem, module_name)
            assert spec is not None and spec.loader is not None
            found: Any = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, found)  # dataclasses look their module up
            sys.path.insert(0, str(pathlib.Path(module_name).resolve().parent))  # as `python file.py` has it
            spec.loader.exec_module(found)
        else:
            if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` has it
                sys.path.insert(0, os.getcwd())
            found = importlib.import_module(module_name)
    except (ShardError, OSError):
        raise
    except Exception as error:
        fail(StrategyError, f"module `{module_name}` cannot be imported", where=_last_line(error) or name,
             why=f"{type(error).__name__}: {_first_lines(error)}",
             fix="see that it can be imported from here, or give the file: path/to/file.py:function")  # fmt: skip
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if callable(getattr(found, n, None)) and not n.startswith("_")]
            fail(StrategyError, f"`{module_name}` has no `{path}`", where=name,
                 fix=f"it has {', '.join(difflib.get_close_matches(part, names, 5, 0.4) or names[:12])}")  # fmt: skip
        found = getattr(found, part)
    if not callable(found):
        fail(StrategyTypeError, f"`{name}` is a {type(found).__name__}, not a {what}", fix="name a callable")
    return found


def _made(name: str) -> tuple[Any, ...]:
    """The arguments that the user's function makes: as shapes where it can be traced, so that none is allocated."""
    make = _load(name, "function that makes arguments")
    try:
        made = jax.eval_shape(make)
    except TypeError:
        made = make()  # it returns more than arrays, or computes with their values
    return made if isinstance(made, tuple) else (made,)


_SHAPE = re.compile(r"\s*(?P<dtype>\w+)\s*\[(?P<dims>[\d\s,]*)\]\s*")


def _shapes(text: str) -> Any:
    """One argument: `f32[16,32]`, or a Python or JSON literal with such strings at its leaves.

    >>> _shapes("bf16[8, 4]")
    ShapeDtypeStruct(shape=(8, 4), dtype=bfloat16)
    >>> _shapes('{"w": ["f32[4]", "i32[]"]}')["w"][1].dtype
    dtype('int32')
    """
    if _SHAPE.fullmatch(text) or "[" not in text or not text.strip().startswith(("[", "{", "(", '"', "'")):
        return _shape(text)
    try:
        tree = json.loads(text)
    except ValueError:
        tree = _literal(text, "--shapes", """quote each shape: '{"w": "f32[4,4]", "b": "f32[4]"}'""")
    return tree_util.tree_map(_shape, tree)


def _shape(text: Any) -> jax.ShapeDtypeStruct:
    found = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        fail(StrategyError, f"`{text}` is not a shape", where="--shapes", why="a shape is an element type and its dims",
             fix="write f32[16,32], bf16[8,128,64], i32[] …")  # fmt: skip
    name = DTYPES.get(found["dtype"], found["dtype"])
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        fail(StrategyError, f"`{found['dtype']}` is not an element type", where=f"--shapes {text}",
             fix=f"use one of {', '.join(DTYPES)}, or NumPy's name of it")  # fmt: skip
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        fail(StrategyError, f"JAX has {dtype} only where it is told to", where=f"--shapes {text}",
             fix="set JAX_ENABLE_X64=1 in the environment, or take 32 bits")  # fmt: skip
    return jax.ShapeDtypeStruct(tuple(int(n) for n in found["dims"].split(",") if n.strip()), dtype)


class _Names(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(shardfn.AUTO) if node.id == "AUTO" else node  # type: ignore[arg-type]


_WRITE = 'write tuples of ints, None and AUTO in quotes: "((4, 1), None, AUTO)"'


def _literal(text: str | None, option: str, fix: str = _WRITE) -> Any:
    """A Python literal, in which AUTO may stand; nothing is evaluated.

    >>> _literal("((4, 1), None, AUTO)", "--in-strategy")
    ((4, 1), None, AUTO)
    """
    if text is None:
        return None
    try:
        return ast.literal_eval(_Names().visit(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, TypeError, RecursionError) as error:
        reason = "it does not parse" if isinstance(error, SyntaxError) else "it is more than a literal"
        fail(StrategyError, f"{option} cannot be read", where=f"{option} {text}", why=reason, fix=fix)


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).strip().splitlines()[:2])


def _last_line(error: Exception) -> str:
    """The last line of the user's own code that an error came through."""
    packages = (str(pathlib.Path(module.__file__ or "").parent) for module in (shardfn, jax))
    others = ("<frozen ", sysconfig.get_path("stdlib"), *packages)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
