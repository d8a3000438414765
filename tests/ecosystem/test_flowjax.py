"""FlowJAX: normalizing flows."""

import jax
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow, masked_autoregressive_flow

from tests.ecosystem.rows import Row, check, normal, table


def density(make):
    def build():
        flow = make(jax.random.key(0), base_dist=Normal(jax.numpy.zeros(4)), flow_layers=2, nn_width=16)
        return Row(lambda flow, x: flow.log_prob(x), (flow, normal(64, 4)), batch=(1,), gradient=False, tolerance=1e-3)

    return build


ROWS = {"coupling flow": density(coupling_flow), "masked autoregressive flow": density(masked_autoregressive_flow)}


@table(__name__, ROWS)
def test_flowjax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
