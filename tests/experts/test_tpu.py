"""Dropless experts as XLA's TPU compiler compiles them: rows travel by ragged all-to-all, as the report says."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import shardfn
from shardfn import experts

TOKENS, WIDTH, HIDDEN, EXPERTS, K = 1024, 128, 256, 16, 2


def layer(x, gate, up, down):
    layout = NamedSharding(AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,)), PartitionSpec("a"))
    sent = experts.dispatch(x, experts.route(x @ gate, K), layout=layout)
    return experts.combine(sent.dot(jax.nn.gelu(sent.dot(sent.rows, up)), down), sent)


def loss(*arrays):
    return (layer(*arrays) ** 2).sum()


@pytest.mark.tpu
@pytest.mark.parametrize(("function", "exchanges"), [(layer, 2), (jax.grad(loss, argnums=(0, 1, 2, 3)), 4)],
                         ids=["forward", "gradient"])  # fmt: skip
def test_dropless_rows_travel_by_ragged_alltoall(function, exchanges):
    pytest.importorskip("libtpu")
    shapes = (TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    entries = ((8, 1), (1, 1), (8, 1, 1), (8, 1, 1))
    f = shardfn.shard(function, in_strategy=entries, device="tpu-v5e:2x4")
    assert f.lower(*arrays).as_text().count("@ragged_all_to_all") == exchanges
    report = f.plan(*arrays).verify().to_dict()
    rows = TOKENS // 8 * K * WIDTH * 4 * 7 // 8
    for found in (report["collectives"], report["compiled"]["collectives"]):
        sent = [c["total_bytes"] for c in found if c["kind"] == "all-to-all" and c["total_bytes"] > rows // 2]
        assert sent == [rows] * exchanges, "the compiler keeps the ragged exchanges, and both sides count their rows"
