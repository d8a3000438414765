"""MuJoCo MJX: batches of simulations."""

import jax
import mujoco
from mujoco import mjx

from tests.ecosystem.rows import Row, check, normal, table

XML = """<mujoco><worldbody><body><joint type="hinge" axis="0 1 0"/><geom size=".05 .2" type="capsule"/>
<body pos="0 0 .3"><joint type="hinge" axis="0 1 0"/><geom size=".05 .2" type="capsule"/></body></body></worldbody></mujoco>"""


def step():
    model = mjx.put_model(mujoco.MjModel.from_xml_string(XML))

    def run(qpos, qvel):
        def one(qpos, qvel):
            data = mjx.make_data(model).replace(qpos=qpos, qvel=qvel)
            data = mjx.step(model, data)
            return data.qpos, data.qvel

        return jax.vmap(one)(qpos, qvel)

    return Row(run, (normal(16, 2), normal(16, 2, seed=1)), batch=(0, 1), gradient=False, tolerance=2e-3)


ROWS = {"step": step}


@table(__name__, ROWS)
def test_mjx_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
