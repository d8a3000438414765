"""The one language of globs: what a pattern meets, and which of two rules speaks of a path."""

import pytest

from shardfn.frontend.paths import escaped, met, near, ruled

PATHS = ["params/layers/0/w", "params/layers/1/w", "params/head", "x"]


@pytest.mark.parametrize(
    ("glob", "hits"),
    [
        ("params/layers/0/w", [0]),
        ("layers/0/w", [0]),
        ("self.layers.0.w", [0]),
        ("layers[1]['w']", [1]),
        ("*/w", [0, 1]),
        ("*", [0, 1, 2, 3]),
        ("layers/?/w", [0, 1]),
        ("head", [2]),
        ("layers", []),
        ("w", []),
    ],
)
def test_what_a_glob_meets(glob, hits):
    assert met(glob, PATHS)[0] == hits
    assert sorted(ruled([glob], PATHS, lambda a, b: True).rules) == hits


@pytest.mark.parametrize(
    ("globs", "rules", "missing", "clashes"),
    [
        (["*", "head"], {0: 0, 1: 0, 2: 1, 3: 0}, (), ()),
        (["head", "*"], {0: 1, 1: 1, 2: 0, 3: 1}, (), ()),
        (["*/w", "layers/*"], {0: 1, 1: 1}, (), ((0, 0, 1), (1, 0, 1))),
        (["head", "params.head"], {2: 1}, (), ((2, 0, 1),)),
        (["nothing", "x"], {3: 1}, (0,), ()),
    ],
)
def test_which_rule_speaks_of_a_path(globs, rules, missing, clashes):
    found = ruled(globs, PATHS, lambda a, b: False)
    assert (found.rules, found.missing, found.clashes) == (rules, missing, clashes)
    assert ruled(globs, PATHS, lambda a, b: True).clashes == ()


def test_a_wildcard_is_no_path_though_there_is_one_of_that_name():
    paths = ["w*", "w1"]
    assert ruled(["w*"], paths, lambda a, b: True).rules == {0: 0, 1: 0}
    assert ruled([escaped("w*")], paths, lambda a, b: True).rules == {0: 0}


def test_near():
    assert near("layer/0/w", PATHS)[0] == "layers/0/w"
    assert near("qqq", PATHS) == []
