"""How good plans are is asked of the default search."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def search_budget():
    """The default."""
