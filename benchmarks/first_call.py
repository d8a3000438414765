"""How long does the first call take beside `jax.jit`, where every sharding is given?

A forward pass of an MLP, a GPT-2 and a ResNet through `shard`, and a training step with AdamW of each through `train.step`:
`init` and the first step. Beside each stands the same by hand, `jax.jit` with the same shardings. Every call is the first one
of a process of its own; the two ways take turns. The arrays are on the devices, imports are done, and their garbage is collected,
before the clock starts: a full collection takes as long as an MLP compiles, and would fall to one of the two ways.
Seconds are those of the processor, all threads together: on a busy machine the clock on the wall says little.
Run: python benchmarks/first_call.py [--only NAME ...] [--rounds N] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from benchmarks import harness
from examples.models import gpt2, mlp, resnet
from shardfn import train

ADAMW = optax.adamw(3e-4)
TENSOR = {name: tuple(1 if axis is None else 4 for axis in axes) for name, axes in gpt2.TENSOR_CUTS.items()}
"""Megatron's tensor parallelism over four of eight devices, as a parameter plan."""


@dataclasses.dataclass(frozen=True)
class Model:
    """`forward(params, x)`, `loss(params, *batch)`, and arrays for them."""

    forward: Callable[..., Any]
    loss: Callable[..., Any]
    init: Callable[[], Any]
    batch: tuple[Any, ...]
    """With the batch in dimension 0, a multiple of the devices."""


def models(name: str) -> Model:
    """One of the models, with small sizes: what is measured grows with the number of ops."""
    key = jax.random.key(0)
    if name == "MLP":
        init = functools.partial(mlp.init, key, 512, 2048, 512)
        x = jax.random.normal(key, (64, 512))
        return Model(mlp.forward, mlp.loss, init, (x, x))
    if name == "GPT":
        cfg = gpt2.Config(layers=2, d_model=256, heads=8, vocab=2048, context=128, batch=8)
        tokens = jax.random.randint(key, (cfg.batch, cfg.context), 0, cfg.vocab)
        loss = functools.partial(gpt2.loss, cfg=cfg)
        return Model(functools.partial(gpt2.forward, cfg=cfg), loss, functools.partial(gpt2.init, key, cfg), (tokens,))
    cfg = resnet.Config(channels=(32, 64), blocks=2, batch=16)
    images = jax.random.normal(key, (cfg.batch, cfg.image, cfg.image, 3))
    labels = jax.random.randint(key, (cfg.batch,), 0, cfg.classes)
    stats = jax.tree.map(lambda x: x, resnet.init(key, cfg)[1])
    return Model(lambda p, x: resnet.forward(p, stats, x)[0], lambda p, x, y: resnet.loss(p, stats, x, y)[0],
                 lambda: resnet.init(key, cfg)[0], (images, labels))  # fmt: skip


def forward(name: str, way: str) -> float:
    """Seconds of the first forward pass: replicated parameters, and the batch over all devices."""
    model = models(name)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put(jax.jit(model.init)(), NamedSharding(mesh, P()))
    x = jax.device_put(model.batch[0], NamedSharding(mesh, P("data")))
    jax.block_until_ready((params, x))
    out = jax.eval_shape(model.forward, params, x)
    entries = (jax.tree.map(lambda a: (1,) * a.ndim, params), (8, *(1,) * (x.ndim - 1)))
    gc.collect()
    start = time.process_time()
    if way == "jit":
        ins = jax.tree.map(lambda a: a.sharding, (params, x))
        function = jax.jit(model.forward, in_shardings=ins, out_shardings=NamedSharding(mesh, P("data")))
    else:
        function = shardfn.shard(model.forward, entries, out_strategy=((8, *(1,) * (out.ndim - 1)),))
    jax.block_until_ready(function(params, x))
    return time.process_time() - start


def step(name: str, layout: str, way: str) -> float:
    """Seconds of `init` and the first training step; by hand both are `jax.jit` with shardings."""
    model = models(name)
    jax.block_until_ready(model.batch)
    gc.collect()
    start = time.process_time()
    if way == "shardfn":
        options: dict[str, Any] = {"mode": "data_parallel"}
        if layout == "tensor parallel":
            of_batch = tuple((2, *(1,) * (x.ndim - 1)) for x in model.batch)
            options = {"mode": "semi_auto_parallel", "in_strategy": of_batch, "parameter_plan": TENSOR}
        sharded = train.step(model.loss, ADAMW, **options)
        state = sharded.init(model.init, *model.batch)
        jax.block_until_ready(sharded(state, *model.batch))
        return time.process_time() - start
    shape = (8, 1) if layout == "data parallel" else (2, 4)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def first() -> tuple[Any, Any]:
        params = model.init()
        return params, ADAMW.init(params)

    def update(state: tuple[Any, Any], *batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, opt_state = state
        value, grads = jax.value_and_grad(model.loss)(params, *batch)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        cuts = gpt2.TENSOR_CUTS if layout == "tensor parallel" else {}
        spec = cuts.get(f"*/{getattr(path[-1], 'key', '')}", ())
        return NamedSharding(mesh, P(*spec))

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(first))
    of_batch = tuple(NamedSharding(mesh, P("data")) for _ in model.batch)
    jitted = jax.jit(
        update,
        in_shardings=(shardings, *of_batch),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    jax.block_until_ready(jitted(jax.jit(first, out_shardings=shardings)(), *model.batch))
    return time.process_time() - start


CASES: dict[str, Callable[[str], float]] = {
    "MLP, forward": functools.partial(forward, "MLP"),
    "GPT, forward": functools.partial(forward, "GPT"),
    "ResNet, forward": functools.partial(forward, "ResNet"),
    "MLP, train.step": functools.partial(step, "MLP", "data parallel"),
    "GPT, train.step": functools.partial(step, "GPT", "data parallel"),
    "GPT tensor parallel, train.step": functools.partial(step, "GPT", "tensor parallel"),
    "ResNet, train.step": functools.partial(step, "ResNet", "data parallel"),
}


def measure(name: str, rounds: int, backend: str) -> dict[str, Any]:
    """A row: medians, and the median of the ratios of neighbouring runs."""
    took: dict[str, list[float]] = {"jit": [], "shardfn": []}
    for _ in range(rounds):
        for way, found in took.items():
            found.append(harness.in_own_process(CASES[name], way, backend=backend, devices=8))
    return {
        "program": name,
        "jit CPU s": statistics.median(took["jit"]),
        "shardfn CPU s": statistics.median(took["shardfn"]),
        "ratio": statistics.median(b / a for a, b in zip(*took.values(), strict=True)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="NAME", default=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    options = harness.parse(parser, devices=8)
    rows: list[dict[str, Any]] = []
    title = f"first calls on 8 devices, every sharding given; {options.rounds} rounds"
    for name in options.only:  # each takes a minute: what was measured is kept
        rows.append(measure(name, options.rounds, options.platform))
        harness.show(rows[-1:], title * (len(rows) == 1))
        harness.save(options.json, {"first calls": rows}, notes=[title])


if __name__ == "__main__":
    main()
