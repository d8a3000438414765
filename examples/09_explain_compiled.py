"""Predictions compared with XLA: the cost of a good and of a bad strategy, and where the compiler does better."""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from shardfn import shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def attention(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk,hkd->btd", weights, v, wo)


keys = jax.random.split(jax.random.key(0), 5)
shapes = [(4, 16, 32), (32, 8, 4), (32, 8, 4), (32, 8, 4), (8, 4, 32)]
args = [jax.random.normal(k, s) * 0.3 for k, s in zip(keys, shapes, strict=True)]

by_heads = shard(attention, ((2, 1, 1), (1, 4, 1), (1, 4, 1), (1, 4, 1), (4, 1, 1)))
by_time = shard(attention, ((1, 8, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (1, 1, 8)))

for name, function in (("heads", by_heads), ("time", by_time)):
    np.testing.assert_allclose(function(*args), attention(*args), rtol=1e-3, atol=1e-4)
    report = function.explain(*args, compiled=True)
    data = report.to_dict()
    print(f"by {name}: {data['cost']['bytes_sent']:,} bytes predicted")
    for kind, both in data["compiled"]["kinds"].items():
        print(f"  {kind:20} {both['predicted']['count']} predicted, {both['compiled']['count']} compiled,"
              f" {both['compiled']['bytes_sent']:,} bytes")  # fmt: skip
    for why in data["compiled"]["differences"]:
        print("  ", why)

# The report as a web page, with pictures and the lines that communicate; a notebook shows it without a call.
with tempfile.TemporaryDirectory() as directory:
    page = pathlib.Path(directory) / "report.html"
    by_heads.explain(*args).save(page)
    print(f"{page.name} has {page.read_text(encoding='utf-8').count('<svg')} pictures")

# The compiled program is JAX's own.
hlo = by_heads.lower(*args).compile().as_text()
assert hlo.count(" all-reduce(") + hlo.count(" all-reduce-start(") == 1
