"""Golden files, texts that a reviewer reads; and what a test needs that may not be installed."""

import os
import pathlib

import jax
import pytest

from shardfn.compiled.targets import has_gpu_compiler
from shardfn.search.problem import BUDGETS, DEFAULT

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def golden():
    """Hold a text against `tests/golden/<name>.txt`; `SHARDFN_UPDATE_GOLDEN=1` rewrites the file instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if os.environ.get("SHARDFN_UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no tests/golden/{name}.txt: write it with SHARDFN_UPDATE_GOLDEN=1, then read it"
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture(autouse=True, scope="module")
def search_budget():
    """A search does a quarter of its default work, as most tests ask what becomes of a plan and not how good it is. Where that
    is the question, or the plan is shown to users, a fixture of this name that does nothing stands in place of this one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, DEFAULT, BUDGETS["fast"])
        yield


@pytest.fixture(scope="session")
def cuda():
    """XLA's GPU compiler; without it the test is left out."""
    if not has_gpu_compiler():
        pytest.skip("JAX's CUDA plugin is not installed")


@pytest.fixture
def compiles():
    """What JAX compiles from here on, each by its name."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **about: events.append(about.get("fun_name")) if "backend_compile" in event else None
    )
    return events


@pytest.fixture
def as_user_code(monkeypatch):
    """For code that asks for its eight CPU devices itself: they are here already, and JAX refuses to be asked again."""
    update = jax.config.update

    def unless_devices(name, value):
        if name not in ("jax_num_cpu_devices", "jax_platforms"):
            update(name, value)

    monkeypatch.setattr(jax.config, "update", unless_devices)
