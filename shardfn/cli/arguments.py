"""What stands on a command line, as objects: functions by name, shapes, literals, and errors of the user's own code."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

import shardfn
from shardfn.errors import ShardError, StrategyError, StrategyTypeError, a, closest, did_you_mean, fail
from shardfn.frontend.callee import is_function
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import shape_of

DTYPES = {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}
DTYPES |= {f"{short}{bits}": f"{name}{bits}" for short, name in (("i", "int"), ("s", "int"), ("u", "uint"))
           for bits in (8, 16, 32, 64)}  # fmt: skip
DTYPES |= {"bf16": "bfloat16", "c64": "complex64", "c128": "complex128", "pred": "bool"}
"""The short names of element types; NumPy's own names do as well."""


@contextlib.contextmanager
def tracing(function: str, fix: str = "check that the shapes are those the function takes") -> Iterator[None]:
    """An error of the user's own function, with its line."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        fail(StrategyError, f"`{function}` cannot be traced: {type(error).__name__}: {_first_lines(error)}",
             where=_last_line(error), fix=fix)  # fmt: skip


def load(name: str, what: str) -> Callable[..., Any]:
    """The object that `module:attribute` or `file.py:attribute` names."""
    module_name, colon, path = name.rpartition(":")
    if not colon or not module_name or not path:
        fail(StrategyError, f"`{name}` does not name a {what}",
             fix="write module:function, for instance jax.numpy:matmul, or file.py:function")  # fmt: skip
    if module_name.endswith(".py") and not pathlib.Path(module_name).is_file():
        near = sorted(path.name for path in pathlib.Path(module_name).parent.glob("*.py"))[:12]
        fail(StrategyError, f"there is no file {module_name}", where=name,
             why="a path is read from the directory that the command is given in",
             fix=f"give the path of a file that is there{': ' + ', '.join(near) if near else ''}")  # fmt: skip
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
            own = [n for n in names if getattr(getattr(found, n), "__module__", "") == getattr(found, "__name__", None)]
            near = closest(part, names, 0.4)
            fail(StrategyError, f"`{module_name}` has no `{path}`", where=name,
                 fix=f"it has {listed(list(dict.fromkeys([*near, *own] or names)))}")  # fmt: skip
        found = getattr(found, part)
    if not is_function(found):
        fail(StrategyTypeError, f"`{name}` is {a(found)}, not a {what}", fix="name a callable")
    return found


def check_given(function: Callable[..., Any], arguments: Sequence[Any], name: str) -> None:
    """Raise a StrategyError where the command line gives another number of arguments than the function takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has none: tracing tells
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = signature.parameters.values()
        needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
        what = f"{len(arguments) or 'no'} argument{'s'[: len(arguments) != 1]}"
        shapes = ' "f32[16,32]"' * len(needed)
        fix = (f"write a shape for each: --shapes{shapes}; or --args FILE.py:FUNCTION, "
               "a function without parameters that returns the tuple of arguments")  # fmt: skip
        fail(StrategyError, f"the command line gives {what} to `{name}`, which takes {', '.join(needed) or 'none'}", where=name,
             why=f"a plan is made from the shapes of the arguments: {error}",
             fix=fix if needed else "leave --shapes and --args out")  # fmt: skip


def made(name: str) -> tuple[Any, ...]:
    """The arguments that the user's function makes: as shapes where it can be traced, so that none is allocated."""
    make = load(name, "function that makes arguments")
    with tracing(name, "see that it can be called as it is, without arguments"):
        try:
            found = jax.eval_shape(make)
        except TypeError:
            found = make()  # it returns more than arrays, or computes with their values
    return found if isinstance(found, tuple) else (found,)


def model(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model on paper: the function and the arguments that the user's function makes, or a tree of shapes and nothing. What is
    no array in a tree, such as a module's activation function, stays as it is."""
    make = load(name, "function that makes a model")
    functions: list[Any] = []
    others: list[tuple[Any, dict[int, Any]]] = []

    def arrays() -> Any:
        found = make()
        if isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple):
            functions.append(found[0])
            found = found[1]
        leaves, structure = tree_util.tree_flatten(found)
        others.append((structure, {i: leaf for i, leaf in enumerate(leaves) if shape_of(leaf) is None}))
        return [None if i in others[0][1] else leaf for i, leaf in enumerate(leaves)]

    with tracing(name, "write a function without parameters that returns (function, arguments) or a tree of parameters, or name "
                 "the function itself and give --args or --shapes too"):  # fmt: skip
        leaves = jax.eval_shape(arrays)
    structure, kept = others[0]
    tree = tree_util.tree_unflatten(structure, [kept.get(i, leaf) for i, leaf in enumerate(leaves)])
    return (functions[0], tree) if functions else (tree, ())


def numbers(words: Sequence[str], option: str) -> tuple[int, ...]:
    """Whole numbers, with spaces or commas between them.

    >>> numbers(["0,1", "4"], "--donate")
    (0, 1, 4)
    """
    text = " ".join(words)
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        fail(StrategyError, f"{option} takes numbers of arguments", where=f"{option} {text}",
             why="an argument is donated by its place, counted from 0", fix=f"write {option} 0 1, or {option} 0,1")  # fmt: skip


_SHAPE = re.compile(r"\s*(?P<dtype>\w+)\s*\[(?P<dims>[\d\s,]*)\]\s*", re.ASCII)


def shapes(text: str) -> Any:
    """One argument: `f32[16,32]`, or a Python or JSON literal with such strings at its leaves.

    >>> shapes("bf16[8, 4]")
    ShapeDtypeStruct(shape=(8, 4), dtype=bfloat16)
    >>> shapes('{"w": ["f32[4]", "i32[]"]}')["w"][1].dtype
    dtype('int32')
    """
    if _SHAPE.fullmatch(text) or "[" not in text or not text.strip().startswith(("[", "{", "(", '"', "'")):
        return _shape(text)
    try:
        tree = json.loads(text)
    except ValueError:
        tree = literal(text, "--shapes", """quote each shape: '{"w": "f32[4,4]", "b": "f32[4]"}'""")
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
             fix=did_you_mean(closest(found["dtype"], DTYPES))
             or f"use one of {', '.join(DTYPES)}, or NumPy's name of it")  # fmt: skip
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        fail(StrategyError, f"JAX has {dtype} only where it is told to", where=f"--shapes {text}",
             fix="set JAX_ENABLE_X64=1 in the environment, or take 32 bits")  # fmt: skip
    return jax.ShapeDtypeStruct(tuple(int(n) for n in found["dims"].split(",") if n.strip()), dtype)


class _Names(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(shardfn.AUTO) if node.id == "AUTO" else node  # type: ignore[arg-type]


_WRITE = 'write tuples of ints, None and AUTO in quotes: "((4, 1), None, AUTO)"'


def literal(text: str | None, option: str, fix: str = _WRITE) -> Any:
    """A Python literal, in which AUTO may stand; nothing is evaluated.

    >>> literal("((4, 1), None, AUTO)", "--in-strategy")
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
