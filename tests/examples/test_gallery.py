"""Every model of the gallery computes at its tiny size what the unsharded function computes; its page shows its figures."""

import importlib

import jax
import numpy as np
import pytest

import shardfn
from benchmarks import gallery
from examples.gallery import NAMES

LIBRARIES = {"mcmc": "numpyro", "molecules": "jraph", "resnet_50": "haiku"}
"""Models of libraries that `make ecosystem` installs; elsewhere they are skipped where the library is absent."""
SLOW = {
    "cholesky",
    "dit_xl",
    "dlrm",
    "gemma2_27b",
    "graph_network",
    "llama3_70b",
    "llama3_8b",
    "llama3_decode",
    "mamba",
    "moe_671b",
    "ode_ensemble",
    "pair_attention",
    "unet",
    "vit_22b",
}
"""Other models and tests have programs of their kinds."""


def script(name):
    """The module of a model."""
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    return importlib.import_module(f"examples.gallery.{name}")


def marks(name):
    return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.ecosystem] * (name in LIBRARIES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in NAMES])
def test_the_tiny_size_equals_the_unsharded_function(name):
    program = script(name).program("tiny")
    sharded = shardfn.shard(program.function, **program.options)
    expected = jax.jit(program.unsharded or program.function)(*program.values())
    found = sharded(*program.values())
    assert any(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(found))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(theirs).max()), 1e-6)
        np.testing.assert_allclose(np.asarray(ours) / scale, np.asarray(theirs) / scale, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_stored_figures(name):
    figures = gallery.stored([name])[0]
    assert set(figures["sizes"]) == {"tiny", *gallery.sizes(script(name))}
    assert (gallery.FOLDER / f"{name}.md").read_text(encoding="utf-8") == gallery.page(name, figures)


def test_the_index_lists_every_model():
    assert (gallery.FOLDER / "index.md").read_text(encoding="utf-8") == gallery.index(gallery.stored())
    assert [figures["name"] for figures in gallery.stored()] == list(NAMES)
