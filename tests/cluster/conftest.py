"""The scripts that the launched processes run hold no doctests, and start JAX when they are imported. A token for Ray."""

import os
import secrets

import pytest

collect_ignore = ["libraries.py", "recovering.py", "roles.py", "table_worker.py", "tls_driver.py", "worker.py"]


@pytest.fixture(scope="session")
def ray_token(tmp_path_factory):
    """Token authentication of all Ray clusters of the tests, as a process reads its token once."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
