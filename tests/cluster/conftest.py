"""The scripts that the launched processes run hold no doctests, and start JAX when they are imported."""

collect_ignore = ["libraries.py", "recovering.py", "roles.py", "worker.py"]
