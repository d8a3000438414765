"""Penzai: models as trees."""

import jax
from penzai import pz
from penzai.models import simple_mlp

from tests.ecosystem.rows import Row, check, normal, table


def mlp():
    model = simple_mlp.MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[16, 64, 8])

    def run(x):
        return model(pz.nx.wrap(x).tag("batch", "features")).untag("batch", "features").unwrap()

    return Row(run, (normal(64, 16),))


def named():
    def run(x, w):
        a, b = pz.nx.wrap(x).tag("batch", "in"), pz.nx.wrap(w).tag("in", "out")
        return pz.nx.nmap(lambda p, q: p @ q)(a.untag("in"), b.untag("in")).untag("batch", "out").unwrap()

    return Row(run, (normal(64, 16), normal(16, 8)))


ROWS = {"MLP": mlp, "named axes": named}


@table(__name__, ROWS)
def test_penzai_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
