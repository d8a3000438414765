"""A driver whose Ray cluster speaks TLS: `tls_driver.py FOLDER`. The environment names the certificates."""

import sys

import numpy as np
import optax
import ray

from shardfn.cluster.parameter_server import ParameterServer, RowGradient
from shardfn.cluster.parameter_server.ray_engine import OnRay

if __name__ == "__main__":  # Ray's workers import it
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
             _node_ip_address="127.0.0.1")  # fmt: skip
    server = ParameterServer.create(np.zeros(4, "float32"), optax.sgd(1.0), folder=sys.argv[1], servers=2, engine=OnRay("tls"),
                                    timeout_s=60)  # fmt: skip
    server.push(RowGradient([1], [-1.0]), 0, 0)
    address = ray.get_runtime_context().gcs_address
    print("pulled", server.pull(version=1).values.tolist(), "from", address, flush=True)
    sys.stdin.readline()
