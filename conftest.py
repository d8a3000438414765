"""Eight virtual CPU devices and a clean context for every test and doctest, wherever pytest is started."""

import importlib.metadata
import os
import sys

# Before JAX is imported, and in each xdist worker too: every worker reads this file first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["NPROC"] = "32"  # JAX before 0.12 can deadlock with fewer threads than twice the devices
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {flags}".strip()

# Half of the time of a compilation is XLA's fusion emitters, which change no value; JAX 0.10 can do without. Not in `make slow`.
NO_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
is_quick = (
    "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"] and NO_EMITTERS not in os.environ["XLA_FLAGS"]
)
if is_quick and importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += f" {NO_EMITTERS}"

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("slow", hypothesis.settings.get_profile("default"), max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _fresh_context():
    """What a test sets in the context ends with it."""
    yield
    context = sys.modules.get("shardfn.mindspore.context")  # where it was never imported, nothing was set
    if context is not None:
        context.reset_auto_parallel_context()
        context.reset_context()
        context.reset_algo_parameters()
