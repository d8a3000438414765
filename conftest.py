"""Eight virtual CPU devices and a clean context for every test and doctest, wherever pytest is started."""

import gc
import importlib.metadata
import importlib.util
import os
import sys

# Before JAX is imported, and in each xdist worker too: every worker reads this file first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["SHARDFN_CHIPS"] = ""  # what the user measured on this machine would change every plan
os.environ["NPROC"] = "32"  # JAX before 0.12 can deadlock with fewer threads than twice the devices
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {flags}".strip()

# What shortens a compilation and changes no value; not in `make slow`. One LLVM module instead of one for each of NPROC
# threads; and no fusion emitters, half of a compilation's time, which JAX 0.10 can do without.
if "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

if importlib.util.find_spec("ray") is None:  # an extra of its own, which `make ray` installs
    collect_ignore = ["shardfn/cluster/parameter_server/ray_engine.py", "shardfn/mindspore/roles.py"]

gc.set_threshold(50_000, 20, 20)  # Python's 700 has the collector walk the objects of JAX and pytest all the time

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
    """What a test sets in the context ends with it, and so does what sharded functions of one function share."""
    yield
    if (shared := sys.modules.get("shardfn.runtime.shared_entries")) is not None:
        shared.forget_shared()
    context = sys.modules.get("shardfn.mindspore.context")  # where it was never imported, nothing was set
    if context is not None:
        context.reset_auto_parallel_context()
        context.reset_context()
        context.reset_algo_parameters()
        context.reset_ps_context()
