"""The scripts that the launched processes run hold no doctests, and start JAX when they are imported."""

collect_ignore = ["recovering.py", "worker.py"]
