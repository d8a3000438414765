"""Other people's libraries: collected by `make ecosystem` only, in an environment that has them all."""

import jax
import pytest


def pytest_ignore_collect(collection_path, config):
    return None if "ecosystem" in (config.option.markexpr or "") else True


@pytest.fixture(autouse=True)
def _jax_as_it_starts():
    """A library that sets a global mesh or double precision when it is imported changes the rows of all others."""
    assert jax.sharding.get_abstract_mesh().empty and not jax.config.jax_enable_x64
