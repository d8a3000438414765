"""Every bad call: the error has its type and place, nothing is compiled before it, and the fix works as typed."""
# ruff: noqa: F401  (a call stands on one line, as typed, and uses the names below)

import dataclasses
import functools

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, explain, plan, reshard, shard
from shardfn.errors import Problem, ShardError
from shardfn.mindspore import Cell, Layout, auto_parallel, set_auto_parallel_context
from tests.messages import refusal, told


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def dense(x, w):
    return x @ w


def double(x):
    return 2 * x


def mlp(params, x):
    return x @ params["w"] + params["b"]


def add(x, w, bias):
    return x @ w + bias


def scaled(x, factor=2.0):
    return x * factor


def power(x, n):
    return x**n


def no_arguments():
    return jax.numpy.ones(4)


def halves(x):
    return x[:4], x[4:]


def named(x):
    return {"mean": x.mean(), "all": x}


def nothing(x):
    return None


def centred(x):
    return x - jax.lax.pmean(x, "batch")


class Opaque:
    def __repr__(self):
        return "Opaque()"


class Dense(Cell):
    def __init__(self):
        self.w1 = zeros(16, 4)

    def __call__(self, x):
        return x @ self.w1


LAYOUT = Layout((2, 4), ("dp", "mp"))


@functools.cache
def names():
    """What the calls below may use."""
    devices = jax.devices()
    return {
        **{k: v for k, v in globals().items() if not k.startswith("_")},
        "devices": devices,
        "linear": nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
        "x": zeros(8, 16),
        "w": zeros(16, 4),
        "params": {"w": zeros(16, 4), "b": zeros(4)},
        "layers": {"layers": [{"w1": zeros(16, 32), "w2": zeros(32, 16)}, {"w1": zeros(16, 32), "w2": zeros(32, 16)}]},
        "mesh": Mesh(np.array(devices).reshape(2, 4), ("dp", "mp")),
        "back": Mesh(np.array(devices[::-1]).reshape(2, 4), ("dp", "mp")),
        "four": Mesh(np.array(devices[:4]), ("dp",)),
        "last": Mesh(np.array(devices[4:]), ("dp",)),
    }


# What is wrong, the call, the error and the places that it names, and the call with the fix as its text says; None where the
# fix is no edit of the call.
CASES = {
    "number of entries": [
        ("too few", "shard(dense, ((8, 1),))(x, w)", "StrategyError: in_strategy", "shard(dense, ((8, 1), AUTO)).plan(x, w)"),
        ("too many", "shard(dense, ((8, 1), (1, 1), (1, 1)))(x, w)", "StrategyError: in_strategy",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("the outer tuple is missing", "shard(double, (8, 1))(x)", "StrategyError: in_strategy",
         "shard(double, ((8, 1),)).plan(x)"),
        ("it is missing, with two arguments", "shard(dense, (8, 1))(x, w)", "StrategyTypeError: in_strategy[0], in_strategy[1]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a function of no arguments", "shard(no_arguments, ((4,),))()", "StrategyError: in_strategy",
         "shard(no_arguments, ()).plan()"),
        ("an entry for a static argument", "shard(power, ((8, 1), ()), static_argnums=1)(x, 2)", "StrategyError: in_strategy",
         "shard(power, ((8, 1),), static_argnums=1).plan(x, 2)"),
        ("an empty tuple", "shard(dense, ())(x, w)", "StrategyError: in_strategy", "shard(dense, (AUTO, AUTO)).plan(x, w)"),
    ],
    "what a strategy is": [
        ("a list", "shard(dense, [(8, 1), (1, 1)])", "StrategyTypeError: in_strategy",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("lists throughout", "shard(dense, [[8, 1], [1, 1]])", "StrategyTypeError: in_strategy",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a dict of arguments", "shard(dense, {'x': (8, 1), 'w': (1, 1)})", "StrategyTypeError: in_strategy",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("None for a dimension", "shard(dense, ((4, None), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((4, AUTO), (1, 1))).plan(x, w)"),
        ("a string", "shard(dense, 'data_parallel')", "StrategyTypeError: in_strategy",
         "shard(dense, ((4, 1), None)).plan(x, w)"),
        ("an int", "shard(double, 8)", "StrategyTypeError: in_strategy", None),
        ("AUTO itself", "shard(dense, AUTO)", "StrategyTypeError: in_strategy", "shard(dense).plan(x, w)"),
        ("a Layout itself", "shard(double, LAYOUT('dp', 'None'))", "StrategyTypeError: in_strategy",
         "shard(double, (LAYOUT('dp', 'None'),)).plan(x)"),
        ("out_strategy as a list", "shard(double, ((8, 1),), [(8, 1)])", "StrategyTypeError: out_strategy",
         "shard(double, ((8, 1),), ((8, 1),)).plan(x)"),
    ],
    "what an entry is": [
        ("a list", "shard(dense, ([8, 1], (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a string", "shard(dense, ('dp', (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("an int", "shard(dense, (8, (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("an array", "shard(dense, (np.array([8, 1]), None))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), None)).plan(x, w)"),
        ("None in the place of a number", "shard(dense, ((8, None), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("None beside AUTO", "shard(dense, ((None, AUTO), (8, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (8, 1))).plan(x, w)"),
        ("AUTO beside a number that does not fit", "shard(dense, ((3, AUTO), (1, 1)))(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((2, AUTO), (1, 1))).plan(x, w)"),
        ("one tuple too deep", "shard(dense, (((8, 1),), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a sharding without axes", "shard(double, (SingleDeviceSharding(devices[0]),))(x)", "StrategyTypeError: in_strategy[0]",
         "shard(double, ((1, 1),)).plan(x)"),
    ],
    "rank": [
        ("too many numbers", "shard(dense, ((8, 1, 1), (1, 1)))(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("too few numbers", "shard(dense, ((8,), (1, 1)))(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("no numbers", "shard(dense, ((), (1, 1)))(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("a number", "shard(scaled, ((8, 1), (1,)))(x, 3.0)", "StrategyError: in_strategy[1]",
         "shard(scaled, ((8, 1), ())).plan(x, 3.0)"),
        ("one entry for arrays of two ranks", "shard(mlp, ((1, 4), (1, 1)))(params, x)", "StrategyError: in_strategy[0]",
         "shard(mlp, ((1, 4), (1, 1)), parameter_plan={'params/b': (1,)}).plan(params, x)"),
        ("a Layout", "shard(double, (LAYOUT('dp'),))(x)", "StrategyError: in_strategy[0]",
         "shard(double, (LAYOUT('dp', 'None'),)).plan(x)"),
        ("a PartitionSpec", "shard(double, (P('dp', None, None),), device=mesh)(x)", "StrategyError: in_strategy[0]",
         "shard(double, (P('dp', None),), device=mesh).plan(x)"),
    ],
    "strategies": [
        ("zero", "shard(dense, ((0, 1), (1, 1)))(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("negative", "shard(dense, ((8, -1), (-1, 1)))(x, w)", "StrategyError: in_strategy[0], in_strategy[1]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a bool", "shard(dense, ((True, 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("a NumPy bool", "shard(dense, ((np.True_, 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("a float", "shard(dense, ((8.0, 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a float between ints", "shard(dense, ((2.5, 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("not a number", "shard(dense, ((float('nan'), 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("infinity", "shard(dense, ((float('inf'), 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
        ("a string", "shard(dense, (('8', 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((8, 1), (1, 1))).plan(x, w)"),
        ("a word", "shard(dense, (('dp', 1), (1, 1)))(x, w)", "StrategyTypeError: in_strategy[0]",
         "shard(dense, ((1, 1), (1, 1))).plan(x, w)"),
    ],
    "sizes": [
        ("not divisible", "shard(dense, ((4, 1), (1, 1)))(zeros(30, 64), zeros(64, 8))", "StrategyError: in_strategy[0]",
         "shard(dense, ((2, 1), (1, 1))).plan(zeros(30, 64), zeros(64, 8))"),
        ("not divisible, of a prime", "shard(double, ((4,),))(zeros(7))", "StrategyError: in_strategy[0]",
         "shard(double, ((4,),)).plan(zeros(8))"),
        ("more shards than elements", "shard(double, ((8,),))(zeros(4))", "StrategyError: in_strategy[0]",
         "shard(double, ((4,),)).plan(zeros(4))"),
        ("more shards than devices", "shard(double, ((4, 4),))(x)", "StrategyError: in_strategy[0]",
         "shard(double, ((4, 2),)).plan(x)"),
        ("the product does not divide", "shard(double, ((3, 1),))(zeros(9, 16))", "StrategyError: in_strategy[0]",
         "shard(double, ((1, 8),)).plan(zeros(9, 16))"),
        ("a very large number", "shard(double, ((2**40, 1),))(x)", "StrategyError: in_strategy[0]",
         "shard(double, ((8, 1),)).plan(x)"),
        ("a device count of six", "shard(double, ((4, 1),), device=devices[:6])(zeros(12, 16))", "StrategyError: in_strategy[0]",
         "shard(double, ((3, 1),), device=devices[:6]).plan(zeros(12, 16))"),
        ("on one device the sizes count all the same", "shard(double, ((3, 1),), device=devices[:1])(x)",
         "StrategyError: in_strategy[0]", "shard(double, ((2, 1),), device=devices[:1]).plan(x)"),
        ("a size that is planned for only", "plan(double, zeros(100, 4), in_strategy=((64, 1),), device='tpu-v5e:8x8')",
         "StrategyError: in_strategy[0]", "plan(double, zeros(100, 4), in_strategy=((4, 1),), device='tpu-v5e:8x8')"),
    ],
    "together": [
        ("two arguments", "shard(add, ((4, 2), (2, 4), (4, 2)))(x, w, zeros(8, 4))", "StrategyError: in_strategy[0]",
         "shard(add, ((4, 2), (2, 4), AUTO)).plan(x, w, zeros(8, 4))"),
        ("an argument and the output", "shard(dense, ((2, 2), (2, 2)), ((2, 2),), device=devices[:4])(x, w)",
         "StrategyError: in_strategy[0]", "shard(dense, ((2, 2), (2, 2)), (AUTO,), device=devices[:4]).plan(x, w)"),
        ("ints that a Layout has no axis for", "shard(dense, ((8, 1), LAYOUT('dp', 'mp')), ((2, 2),))(x, w)",
         "StrategyError: out_strategy[0]", "shard(dense, ((8, 1), LAYOUT('dp', 'mp')), ((2, 4),)).plan(x, w)"),
        ("ints and a Layout that is not called", "shard(dense, ((2, 1), LAYOUT))(x, w)",
         "StrategyError: in_strategy[1]", "shard(dense, ((2, 1), LAYOUT('None', 'mp'))).plan(x, w)"),
        ("ints that a mesh has no axes for", "shard(dense, ((2, 2), P()), device=mesh)(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((2, 4), P()), device=mesh).plan(x, w)"),
        ("ints on a mesh, without the mesh", "shard(dense, ((2, 2), (2, 1)), device=mesh)(x, w)", "StrategyError: in_strategy[0]",
         "shard(dense, ((2, 2), (2, 1)), device=jax.devices()).plan(x, w)"),
        ("two device matrices", "shard(dense, (LAYOUT('dp', 'None'), Layout((4, 2), ('dp', 'mp'))('None', 'mp')))(x, w)",
         "StrategyError: in_strategy[1]", "shard(dense, (LAYOUT('dp', 'None'), LAYOUT('None', 'mp'))).plan(x, w)"),
        ("two orders of ranks",
         "shard(dense, (LAYOUT('dp', 'None'), Layout((2, 4), ('dp', 'mp'), [7, 6, 5, 4, 3, 2, 1, 0])('None', 'mp')))(x, w)",
         "StrategyError: in_strategy[1]", "shard(dense, (LAYOUT('dp', 'None'), LAYOUT('None', 'mp'))).plan(x, w)"),
    ],
    "axes": [
        ("two dims, one axis", "shard(double, (P('dp', 'dp'),), device=mesh)(x)", "StrategyError: in_strategy[0]",
         "shard(double, (P('dp', 'mp'),), device=mesh).plan(x)"),
        ("two dims, one axis of a Layout", "LAYOUT('dp', 'dp')", "LayoutError: Layout((2, 4), ('dp', 'mp'))('dp', 'dp')",
         "LAYOUT('dp', 'None')"),
        ("an axis twice on a dim", "LAYOUT(('dp', 'dp'), 'None')",
         "LayoutError: Layout((2, 4), ('dp', 'mp'))(('dp', 'dp'), 'None')", "LAYOUT(('dp', 'mp'), 'None')"),
        ("an axis that is not there", "LAYOUT('dp', 'sp')", "LayoutError: Layout((2, 4), ('dp', 'mp'))('dp', 'sp')",
         "LAYOUT('dp', 'mp')"),
        ("None in the place of a name", "LAYOUT('dp', None)", "LayoutError: Layout((2, 4), ('dp', 'mp'))('dp', None)",
         "LAYOUT('dp', 'None')"),
        ("an axis that no mesh has", "shard(double, (P('mq'),), device=mesh)(x)", "StrategyError: in_strategy[0]",
         "shard(double, (P('mp'),), device=mesh).plan(x)"),
        ("an axis far from any", "shard(double, (P('batch'),), device=mesh)(x)", "StrategyError: in_strategy[0]",
         "shard(double, (P('dp'),), device=mesh).plan(x)"),
        ("no mesh", "shard(double, (P('dp'),))(x)", "StrategyError: in_strategy[0]",
         "shard(double, (P('dp'),), device=mesh).plan(x)"),
        ("a Layout that is not called", "shard(double, (LAYOUT,))(x)", "StrategyError: in_strategy[0]",
         "shard(double, (LAYOUT('dp', 'mp'),)).plan(x)"),
        ("too few devices in the matrix", "shard(double, (Layout((2, 2), ('a', 'b'))('a', 'b'),))(x)",
         "StrategyError: in_strategy[0]",
         "shard(double, (Layout((2, 2), ('a', 'b'))('a', 'b'),), device=jax.devices()[:4]).plan(x)"),
        ("too many devices in the matrix", "shard(double, (Layout((4, 4), ('a', 'b'))('a', 'b'),))(x)",
         "StrategyError: in_strategy[0]", "shard(double, (Layout((4, 2), ('a', 'b'))('a', 'b'),)).plan(x)"),
        ("a dim that an axis does not divide", "shard(double, (LAYOUT('mp', 'None'),))(zeros(6, 16))",
         "StrategyError: in_strategy[0]", "shard(double, (LAYOUT('dp', 'None'),)).plan(zeros(6, 16))"),
        ("a NamedSharding of other devices", "shard(dense, (None, NamedSharding(four, P('dp'))), device=mesh)(x, w)",
         "StrategyError: in_strategy[1]", "shard(dense, (None, NamedSharding(mesh, P('dp'))), device=mesh).plan(x, w)"),
        ("two meshes", "shard(dense, (NamedSharding(four, P('dp')), NamedSharding(last, P('dp'))))(x, w)",
         "StrategyError: in_strategy[1]",
         "shard(dense, (NamedSharding(four, P('dp')), NamedSharding(four, P('dp')))).plan(x, w)"),
        ("the devices of a mesh in two orders",
         "shard(dense, (NamedSharding(mesh, P('dp')), None), (NamedSharding(back, P('dp')),))(x, w)",
         "StrategyError: out_strategy[0]",
         "shard(dense, (NamedSharding(mesh, P('dp')), None), (NamedSharding(mesh, P('dp')),)).plan(x, w)"),
        ("a layout in memory", "shard(double, (Format(MemoryLayout((1, 0)), NamedSharding(mesh, P('dp'))),))(x)",
         "StrategyError: in_strategy[0]", "shard(double, (NamedSharding(mesh, P('dp')),)).plan(x)"),
        ("a device matrix with a 0", "Layout((0, 8), ('a', 'b'))", "LayoutError: Layout((0, 8), ('a', 'b'))",
         "Layout((1, 8), ('a', 'b'))"),
    ],
    "pytrees": [
        ("a key that is not there", "shard(mlp, ({'kernel': (1, 4), 'b': (4,)}, None))(params, x)",
         "StrategyError: in_strategy[0]", "shard(mlp, ({'b': (4,), 'w': AUTO}, None)).plan(params, x)"),
        ("a key misspelt", "shard(mlp, ({'W': (1, 4), 'b': (4,)}, None))({'w': w, 'b': zeros(4)}, x)",
         "StrategyError: in_strategy[0]", "shard(mlp, ({'w': (1, 4), 'b': (4,)}, None)).plan(params, x)"),
        ("a key left out", "shard(mlp, ({'w': (1, 4)}, None))(params, x)", "StrategyError: in_strategy[0]",
         "shard(mlp, ({'b': AUTO, 'w': (1, 4)}, None)).plan(params, x)"),
        ("another length", "shard(lambda weights: weights, (((8, 1), (1, 4), AUTO),))([w, w])", "StrategyError: in_strategy[0]",
         "shard(lambda weights: weights, (((8, 1), (1, 4)),)).plan([w, w])"),
        ("deep inside", "shard(lambda p: p, ({'layers': [{'w1': (1, 3), 'w2': AUTO}, AUTO]},))(layers)",
         "StrategyError: in_strategy[0]['layers'][0]['w1']",
         "shard(lambda p: p, ({'layers': [{'w1': (1, 4), 'w2': AUTO}, AUTO]},)).plan(layers)"),
        ("a leaf that is no array", "shard(dense, (None, None))(x, 'w')", "StrategyTypeError: w", None),
        ("a leaf inside that is no array", "shard(lambda p: p['a'])({'a': x, 'note': Opaque()})", "StrategyTypeError: p/note",
         None),
        ("an array of objects", "shard(dense)(x, np.array([None]))", "StrategyTypeError: w", None),
        ("an array of strings", "shard(dense)(x, np.array(['a', 'b']))", "StrategyTypeError: w", None),
        ("another byte order", "shard(double)(zeros(2, dtype='>f4'))", "StrategyTypeError: x",
         "shard(double).plan(zeros(2, dtype='float32'))"),
        ("dates", "shard(double)(np.array(['2026-01-01'], dtype='datetime64[D]'))", "StrategyTypeError: x", None),
    ],
    "where it is called": [
        ("with a shape", "shard(dense)(x, jax.ShapeDtypeStruct((16, 4), 'float32'))", "StrategyTypeError: w",
         "shard(dense).plan(x, jax.ShapeDtypeStruct((16, 4), 'float32'))"),
        ("inside a shard_map", "jax.jit(jax.shard_map(shard(double), mesh=mesh, in_specs=P('dp'), out_specs=P('dp')))(x)",
         "StrategyError: the axes dp, mp of the shard_map",
         "jax.jit(jax.shard_map(shard(double).fn, mesh=mesh, in_specs=P('dp'), out_specs=P('dp')))(x)"),
        ("by integers inside a shard_map",
         "shard(lambda x: jax.shard_map(shard(double, ((2, 1),)), mesh=mesh, in_specs=P('dp'), out_specs=P('dp'), axis_names={'dp'})(x))(x)",
         "StrategyError: in_strategy[0]",
         "shard(lambda x: jax.shard_map(shard(double, (P('mp'),)), mesh=mesh, in_specs=P('dp'), out_specs=P('dp'), axis_names={'dp'})(x),"
         " device=mesh)(x)"),
        ("inside a pmap", "jax.pmap(shard(double))(x.reshape(8, -1))", "StrategyError: the pmap around it",
         "jax.pmap(shard(double).fn)(x.reshape(8, -1))"),
        ("along an axis of a vmap", "jax.vmap(shard(centred), axis_name='batch')(x)", "StrategyError: axis_name",
         "shard(jax.vmap(centred, axis_name='batch'))(x)"),
    ],
    "parameter_plan": [
        ("an unknown path", "shard(dense, parameter_plan={'v': (1, 4)})(x, w)", "StrategyError: parameter_plan['v']",
         "shard(dense, parameter_plan={'w': (1, 4)}).plan(x, w)"),
        ("a path misspelt", "shard(mlp, parameter_plan={'params/ww': (1, 4)})(params, x)",
         "StrategyError: parameter_plan['params/ww']", "shard(mlp, parameter_plan={'params/w': (1, 4)}).plan(params, x)"),
        ("a glob that meets nothing", "shard(lambda p: p, parameter_plan={'*/w3': (1, 4)})(layers)",
         "StrategyError: parameter_plan['*/w3']", "shard(lambda p: p, parameter_plan={'*/w1': (1, 4)}).plan(layers)"),
        ("what holds arrays", "shard(mlp, parameter_plan={'params': None})(params, x)", "StrategyError: parameter_plan['params']",
         "shard(mlp, parameter_plan={'params/*': None}).plan(params, x)"),
        ("the same in what_if", "plan(lambda p: p, layers).what_if({'p/layers/0': None})", "StrategyError: what_if['p/layers/0']",
         "plan(lambda p: p, layers).what_if({'p/layers/0/*': None})"),
        ("a parameter of a Cell", "Dense().shard(((8, 1),), parameter_plan={'self.w2': (1, 4)})(x)",
         "StrategyError: parameter_plan['self.w2']", "Dense().shard(((8, 1),), parameter_plan={'self.w1': (1, 4)}).plan(x)"),
        ("a parameter of a module", "shard(linear, parameter_plan={'weight': (1, 4)})(x)",
         "StrategyError: parameter_plan['weight']", "shard(linear, parameter_plan={'kernel': (1, 4)}).plan(x)"),
        ("a list of names", "shard(dense, parameter_plan=['w'])", "StrategyTypeError: parameter_plan", None),
        ("a value that is a list", "shard(dense, parameter_plan={'w': [1, 4]})", "StrategyTypeError: parameter_plan['w']",
         "shard(dense, parameter_plan={'w': (1, 4)}).plan(x, w)"),
        ("a value that is an int", "shard(dense, parameter_plan={'w': 4})", "StrategyTypeError: parameter_plan['w']", None),
        ("a key that is no string", "shard(dense, parameter_plan={1: (1, 4)})", "StrategyTypeError: parameter_plan[1]", None),
        ("rank", "shard(dense, parameter_plan={'w': (1, 4, 1)})(x, w)", "StrategyError: parameter_plan['w']",
         "shard(dense, parameter_plan={'w': (1, 4)}).plan(x, w)"),
        ("not divisible", "shard(dense, parameter_plan={'w': (1, 8)})(x, w)", "StrategyError: parameter_plan['w']",
         "shard(dense, parameter_plan={'w': (1, 4)}).plan(x, w)"),
        ("two rules", "shard(dense, parameter_plan={'?': (1, 4), '*w': (4, 1)})(x, w)", "StrategyError: parameter_plan['?']",
         "shard(dense, parameter_plan={'x': (1, 4), '*w': (4, 1)}).plan(x, w)"),
    ],
    "out_strategy": [
        ("too many", "shard(dense, None, ((8, 1), (1, 4)))(x, w)", "StrategyError: out_strategy",
         "shard(dense, None, ((8, 1),)).plan(x, w)"),
        ("too few", "shard(halves, None, ((4, 1),))(x)", "StrategyError: out_strategy",
         "shard(halves, None, ((4, 1), AUTO)).plan(x)"),
        ("the outer tuple is missing", "shard(dense, None, (8, 1))(x, w)", "StrategyError: out_strategy",
         "shard(dense, None, ((8, 1),)).plan(x, w)"),
        ("rank", "shard(dense, None, ((2, 1, 1),))(x, w)", "StrategyError: out_strategy[0]",
         "shard(dense, None, ((2, 1),)).plan(x, w)"),
        ("not divisible", "shard(dense, None, ((1, 8),))(x, w)", "StrategyError: out_strategy[0]",
         "shard(dense, None, ((1, 4),)).plan(x, w)"),
        ("another structure", "shard(named, None, ({'max': (), 'all': (8, 1)},))(x)", "StrategyError: out_strategy[0]",
         "shard(named, None, ({'all': (8, 1), 'mean': AUTO},)).plan(x)"),
        ("nothing is returned", "shard(nothing, None, ((8, 1),))(x)", "StrategyError: out_strategy[0]", None),
        ("wrong, though the context would override it",
         "set_auto_parallel_context(parallel_mode='semi_auto_parallel') or shard(dense, None, ((3, 1),))(x, w)",
         "StrategyError: out_strategy[0]", None),
    ],
    "device": [
        ("unknown", "shard(double, device='quantum')(x)", "DeviceError: device", "shard(double, device='CPU').plan(x)"),
        ("misspelt", "shard(double, device='cpuu')(x)", "DeviceError: device", "shard(double, device='CPU').plan(x)"),
        ("not here", "shard(double, device='GPU')(x)", "DeviceError: device", "shard(double, device='CPU').plan(x)"),
        ("not here either", "shard(double, device='Ascend')(x)", "DeviceError: device",
         "shard(double, device='tpu-v5e:4x4').plan(x)"),
        ("empty", "shard(double, device='')(x)", "DeviceError: device", "shard(double, device='CPU').plan(x)"),
        ("a target that is unknown", "plan(double, x, device='tpu-v5x:4x4')", "DeviceError: device",
         "plan(double, x, device='tpu-v5p:4x4')"),
        ("a target without a size", "plan(double, x, device='h200')", "DeviceError: device", "plan(double, x, device='h200:8')"),
        ("a target with a bad size", "plan(double, x, device='h200:0')", "DeviceError: device",
         "plan(double, x, device='h200:64')"),
        ("a shape without a torus", "plan(double, x, device='h100:4x4')", "DeviceError: h100:4x4",
         "plan(double, x, device='h100:16')"),
        ("three dims of two", "plan(double, x, device='tpu-v5e:4x4x4')", "DeviceError: tpu-v5e:4x4x4",
         "plan(double, x, device='tpu-v5e:8x8')"),
        ("three dims that are too many", "plan(double, x, device='tpu-v6e:16x16x2')", "DeviceError: tpu-v6e:16x16x2",
         "plan(double, x, device='tpu-v6e:16x16')"),
        ("four dims of three", "plan(double, x, device='tpu-v5p:2x2x2x2')", "DeviceError: tpu-v5p:2x2x2x2",
         "plan(double, x, device='tpu-v5p:2x2x4')"),
        ("more chips than a pod", "plan(double, x, device='tpu-v5e:512')", "DeviceError: tpu-v5e:512",
         "plan(double, x, device='tpu-v5e:16x16')"),
        ("a pod that is too long", "plan(double, x, device='tpu-v4:4x4x64')", "DeviceError: tpu-v4:4x4x64",
         "plan(double, x, device='tpu-v4:16x16x16')"),
        ("a slice that no pod has", "plan(double, x, device='tpu-v5e:3x5')", "DeviceError: tpu-v5e:3x5",
         "plan(double, x, device='tpu-v5e:2x4')"),
        ("a slice that is made of no cubes", "plan(double, x, device='tpu-v5p:4x4x6')", "DeviceError: tpu-v5p:4x4x6",
         "plan(double, x, device='tpu-v5p:4x4x8')"),
        ("a call of a target", "shard(double, device='tpu-v5e:8')(x)", "StrategyError: device",
         "shard(double, device='tpu-v5e:8').plan(x)"),
        ("compiled for a target", "explain(double, x, device='tpu-v5e:8', compiled=True)", "DeviceError: compiled",
         "explain(double, x, device='tpu-v5e:8')"),
        ("a call of a target that could be here", "shard(double, device='cpu:8')(x)", "StrategyError: device",
         "shard(double)(x)"),
        ("compiled for a target that could be here", "explain(double, x, device='cpu:4', compiled=True)", "DeviceError: compiled",
         "explain(double, x, device=jax.devices()[:4], compiled=True)"),
        ("digits of another script", "plan(double, x, device='h100:٣')", "DeviceError: device",
         "plan(double, x, device='h100:8')"),
        ("a number", "shard(double, device=4)", "StrategyTypeError: device", "shard(double, device=jax.devices()[:4]).plan(x)"),
        ("names in a list", "shard(double, device=['CPU'])(x)", "DeviceError: device",
         "shard(double, device=jax.devices()).plan(x)"),
        ("one of them twice", "shard(double, device=[devices[0], devices[0]])(x)", "DeviceError: device",
         "shard(double, device=devices[:2]).plan(x)"),
        ("no devices", "shard(double, device=[])(x)", "DeviceError: device", "shard(double, device=jax.devices()).plan(x)"),
        ("a bool", "shard(double, device=True)", "StrategyTypeError: device", None),
    ],
    "level and search": [
        ("an option misspelt", "plan(double, x, lebel=1)", "StrategyTypeError: lebel", "plan(double, x, level=1)"),
        ("too high", "shard(double, level=3)", "StrategyError: level", "shard(double, level=2).plan(x)"),
        ("MindSpore's silent 7", "shard(double, ((8, 1),), ((8, 1),), 'CPU', 7)", "StrategyError: level", None),
        ("negative", "shard(double, level=-1)", "StrategyError: level", "shard(double, level=0).plan(x)"),
        ("a bool", "shard(double, level=True)", "StrategyTypeError: level", "shard(double, level=1).plan(x)"),
        ("a string", "shard(double, level='0')", "StrategyTypeError: level", "shard(double, level=0).plan(x)"),
        ("a float", "shard(double, level=1.0)", "StrategyTypeError: level", "shard(double, level=1).plan(x)"),
        ("an unknown search", "shard(double, search_mode='greedy')", "ContextError: search_mode",
         "shard(double, search_mode='auto').plan(x)"),
        ("a search that is no string", "shard(double, search_mode=3)", "ContextError: search_mode",
         "shard(double, search_mode='auto').plan(x)"),
        ("a limit without end", "shard(double, memory_limit=float('inf'))", "StrategyError: memory_limit",
         "shard(double).plan(x)"),
        ("a limit that is no number", "shard(double, memory_limit=float('nan'))", "StrategyError: memory_limit",
         "shard(double, memory_limit='14GiB').plan(x)"),
        ("a limit of nothing", "shard(double, memory_limit=0)", "StrategyError: memory_limit",
         "shard(double, memory_limit='14GiB').plan(x)"),
        ("a limit below nothing", "shard(double, memory_limit=-1)", "StrategyError: memory_limit",
         "shard(double, memory_limit='14GiB').plan(x)"),
        ("a limit without its unit", "plan(dense, x, w, device='cpu:1', memory_limit='1')", "StrategyError: memory_limit",
         "plan(dense, x, w, device='cpu:1', memory_limit='1GiB')"),
        ("options of the compiler that are a number", "shard(double, compiler_options=3)", "StrategyTypeError: compiler_options",
         "shard(double, compiler_options={}).plan(x)"),
        ("options of the compiler without names", "shard(double, compiler_options={3: True})",
         "StrategyTypeError: compiler_options", "shard(double, compiler_options={'xla_cpu_enable_fast_math': True}).plan(x)"),
    ],
    "what is sharded": [
        ("a number", "shard(3)", "StrategyTypeError: fn", None),
        ("a strategy, in a decorator", "shard(((8, 1),))", "StrategyTypeError: fn",
         "shard(in_strategy=((8, 1),))(double).plan(x)"),
        ("a string", "shard('dense')", "StrategyTypeError: fn", None),
    ],
    "static and donated arguments": [
        ("not hashable", "shard(power, static_argnums=1)(x, [2])", "StrategyTypeError: n",
         "shard(power, static_argnums=1).plan(x, 2)"),
        ("a number past the end", "shard(power, static_argnums=2)", "StrategyError: static_argnums",
         "shard(power, static_argnums=1).plan(x, 2)"),
        ("a number before the start", "shard(power, donate_argnums=-3)", "StrategyError: donate_argnums",
         "shard(power, donate_argnums=0).plan(x, 2)"),
        ("a name that is not there", "shard(power, static_argnames='m')", "StrategyError: static_argnames",
         "shard(power, static_argnames='n').plan(x, 2)"),
        ("a name among the numbers", "shard(power, static_argnums='n')", "StrategyTypeError: static_argnums",
         "shard(power, static_argnames='n').plan(x, 2)"),
        ("a number among the names", "shard(power, static_argnames=1)", "StrategyTypeError: static_argnames",
         "shard(power, static_argnums=1).plan(x, 2)"),
        ("both static and donated", "shard(power, static_argnums=1, donate_argnames='n')", "StrategyError: static",
         "shard(power, static_argnums=1).plan(x, 2)"),
    ],
    "the context": [
        ("more devices than there are", "auto(lambda: shard(double)(x), device_num=16)", "DeviceError: device_num",
         "auto(lambda: shard(double).plan(x), device_num=8)"),
        ("a strategy for more devices than are used", "auto(lambda: shard(double, ((8, 1),))(x), device_num=4)",
         "StrategyError: in_strategy[0]", "auto(lambda: shard(double, ((4, 1),)).plan(x), device_num=4)"),
        ("more devices than are listed", "auto(lambda: shard(double, device=devices[:4])(x), device_num=8)",
         "DeviceError: device_num", "auto(lambda: shard(double, device=devices[:4]).plan(x), device_num=4)"),
        ("fewer devices than a mesh has", "auto(lambda: shard(double, device=mesh)(x), device_num=4)", "DeviceError: device_num",
         "auto(lambda: shard(double, device=mesh).plan(x), device_num=8)"),
        ("a rank among fewer devices", "auto(lambda: shard(double)(x), device_num=4, global_rank=4)",
         "ContextError: set_auto_parallel_context(global_rank=4)",
         "auto(lambda: shard(double).plan(x), device_num=4, global_rank=3)"),
        ("a mode without operators to shard", "auto(lambda: shard(double)(x), parallel_mode='data_parallel')",
         "ContextError: parallel_mode", "auto(lambda: shard(double).plan(x), parallel_mode='semi_auto_parallel')"),
        ("a dataset_strategy for more arguments", "auto(lambda: shard(double)(x), dataset_strategy=((8, 1), (8, 1)))",
         "StrategyError: dataset_strategy", "auto(lambda: shard(double).plan(x), dataset_strategy=((8, 1),))"),
        ("a dataset_strategy of another rank", "auto(lambda: shard(double)(x), dataset_strategy=((8,),))",
         "StrategyError: dataset_strategy[0]", "auto(lambda: shard(double).plan(x), dataset_strategy=((8, 1),))"),
    ],
    "reshard": [
        ("no array", "reshard(3, LAYOUT('dp', 'mp'))", "StrategyTypeError: x", "reshard(x, LAYOUT('dp', 'mp'))"),
        ("no Layout", "reshard(x, (2, 4))", "StrategyTypeError: sharding", "reshard(x, LAYOUT('dp', 'None'))"),
        ("a Layout that is not called", "reshard(x, LAYOUT)", "LayoutError: Layout((2, 4), ('dp', 'mp'))",
         "reshard(x, LAYOUT('dp', 'None'))"),
        ("another rank", "reshard(x, LAYOUT('dp'))", "LayoutError: shape (8, 16) under Layout((2, 4), ('dp', 'mp'))('dp')",
         "reshard(x, LAYOUT('dp', 'None'))"),
        ("not divisible", "reshard(zeros(7, 16), LAYOUT('dp', 'None'))",
         "LayoutError: shape (7, 16) under Layout((2, 4), ('dp', 'mp'))('dp', 'None')",
         "reshard(zeros(8, 16), LAYOUT('dp', 'None'))"),
    ],
    "a plan's methods": [
        ("why of no path", "plan(double, x).why('')", "StrategyError: why('')", "plan(double, x).why('x')"),
        ("why of a slash", "plan(double, x).why('/')", "StrategyError: why('/')", "plan(double, x).why('result')"),
        ("saved to a number", "plan(double, x).save(3.5)", "StrategyTypeError: path", None),
        ("saved to no name", "plan(double, x).save('')", "LayoutFileError: path", None),
    ],
    "several at once": [
        ("arguments, outputs and paths", "shard(dense, ((3, 1), (1, 5)), ((1, 3),), parameter_plan={'bias': (1,)})(x, w)",
         "StrategyError: parameter_plan['bias'], in_strategy[0], in_strategy[1], out_strategy[0]", None),
        ("in one array", "shard(dense, ((3, 5), (0, -1)))(x, w)", "StrategyError: in_strategy[0], in_strategy[1]", None),
        ("options", "shard(dense, [(8, 1)], [(8, 1)], True, 9, parameter_plan=['w'], static_argnums=5, search_mode='greedy')",
         "StrategyError: level, in_strategy, out_strategy, parameter_plan, device, static_argnums, search_mode", None),
        ("types and values", "shard(dense, ((True, 0), (1.5, 3)))(x, w)", "StrategyError: in_strategy[0], in_strategy[1]", None),
        ("a device and a strategy", "shard(dense, ((3, 1), (1, True)), device='quantum')(x, w)",
         "StrategyError: device, in_strategy[0], in_strategy[1]", None),
        ("a leaf and a strategy", "shard(add, ((3, 1), None, None))(x, 'w', 1.0)", "StrategyError: w, in_strategy[0]", None),
        ("layers", "shard(lambda p: p, ((1, 3),))(layers)", "StrategyError: in_strategy[0]", None),
        ("many alike", "shard(lambda p: p, parameter_plan={'p/*': (1,)})(layers)", "StrategyError: parameter_plan['p/*']", None),
        ("many alike in what_if", "plan(lambda p: p, layers).what_if({'p/*': (1,)})", "StrategyError: what_if['p/*']", None),
    ],
}  # fmt: skip
ROWS = [pytest.param(*row[1:], id=f"{group}: {row[0]}") for group, rows in CASES.items() for row in rows]


SHOWN = (
    ("number of entries", "too few"), ("what a strategy is", "a list"), ("rank", "one entry for arrays of two ranks"),
    ("sizes", "not divisible"), ("together", "two arguments"), ("axes", "an axis that no mesh has"), ("pytrees", "a key misspelt"),
    ("parameter_plan", "a glob that meets nothing"), ("device", "a slice that no pod has"),
    ("level and search", "a limit without its unit"), ("several at once", "options"),
)  # fmt: skip
"""The cases whose full text a reviewer reads in golden/messages_calls.txt."""


def auto(call, **settings):
    with auto_parallel(**settings):
        return call()


def refused(code: str) -> ShardError:
    error = refusal(eval, code, names())
    shardfn.mindspore.reset_auto_parallel_context()
    return error


def test_message_of_a_bad_call_reads_as_the_golden_file(golden):
    calls = {(group, row[0]): row[1] for group, rows in CASES.items() for row in rows}
    texts = (f">>> {calls[case]}\n{type(error).__name__}: {error}" for case in SHOWN if (error := refused(calls[case])))
    golden("messages_calls", "\n\n".join(texts))


@pytest.mark.parametrize(("code", "expected", "fixed"), ROWS)
def test_bad_call_is_refused_before_a_compile_with_type_place_and_fix(code, expected, fixed, compiles):
    names()
    compiles.clear()
    error = refused(code)
    assert not compiles
    assert told(error) == expected
    assert all(
        getattr(p, field.name)
        for p in error.problems
        for field in dataclasses.fields(Problem)
        if field.name != "is_type"
    )


@pytest.mark.parametrize(("code", "expected", "fixed"), [row for row in ROWS if row.values[2]])
def test_fix_of_a_bad_call_works_as_typed(code, expected, fixed):
    eval(fixed, names())
