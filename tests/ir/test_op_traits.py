"""Each kind of op is one row of `ir.op_traits`: the rows are complete, and no other file keeps a table of op names."""

import ast
import pathlib

import pytest

from shardfn.cost.compute import FLOPS
from shardfn.ir.extra_rules import MISSING_RULES
from shardfn.ir.op_traits import OP_TRAITS, OpTraits
from shardfn.partition.op_rules import rule_for

ROOT = pathlib.Path(__file__).parents[2] / "shardfn"
FUSION = {"cheap", "expensive", "view", "slice", "contraction", "none"}

# Ops whose work nobody has written down: the report lists them where they occur.
WITHOUT_COST = {
    "bessel_i1e", "composite", "conj", "is_inf", "is_neg_inf", "is_pos_inf", "next_after", "polygamma", "zeta",
}  # fmt: skip

# Files that tell ops apart by name for what only they do: StableHLO's attributes and regions, HLO text, jaxpr primitives.
MAY_NAME_OPS = {
    "ir/op_traits.py", "ir/mlir.py", "ir/op_attributes.py", "ir/reader.py", "ir/windows.py", "ir/rewrite.py",
    "compiled/hlo.py", "compiled/executable.py",
    "movement/rules/__init__.py", "movement/rewrite.py", "movement/constants.py",  # primitives
    # What one pass or bug of XLA concerns, or one sentence of the report:
    "planning/plan/plan_kind.py", "partition/loop_reductions.py", "planning/inside/op_constraints.py", "planning/workarounds/rewrites.py", "planning/workarounds/windows.py", "planning/workarounds/wrong_ops.py",
    "planning/workarounds/uneven_movement.py",
}  # fmt: skip


def incomplete(row: OpTraits) -> list[str]:
    """The fields of a row that are missing, or that name nothing."""
    wrong = [] if row.flops in (*FLOPS, *([""] if row.name in WITHOUT_COST else [])) else ["flops"]
    wrong += [] if row.fusion in FUSION else ["fusion"]
    wrong += [] if not row.sharding_rule or row.name in MISSING_RULES else ["sharding_rule"]
    try:
        [rule_for(row.name, platform) for platform in ("cpu", "cuda", "tpu")]
    except KeyError:
        wrong.append("rule")
    return wrong


@pytest.mark.parametrize("row", OP_TRAITS.values(), ids=OP_TRAITS.keys())
def test_op_traits_row_is_complete(row):
    assert incomplete(row) == []


def test_op_traits_without_cost_are_those_listed():
    assert {name for name, row in OP_TRAITS.items() if not row.flops} == WITHOUT_COST


def test_incomplete_sees_missing_fields():
    assert incomplete(OpTraits("einsum", "", "fast")) == ["flops", "fusion"]


def tables(tree: ast.AST) -> list[int]:
    """Lines of collections of three or more names, all of them ops."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(keys=parts):
                names = [getattr(part, "value", None) for part in parts]
                if len(names) > 2 and all(isinstance(name, str) and name in OP_TRAITS for name in names):
                    found.append(node.lineno)
    return found


def test_no_other_file_has_a_table_of_ops():
    paths = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    found = {name: tables(ast.parse(path.read_text())) for name, path in paths.items() if name not in MAY_NAME_OPS}
    own = {name: lines for name, lines in found.items() if lines and not name.startswith("train/")}  # there: primitives
    assert own == {}


def test_tables_sees_a_set_of_op_names():
    assert tables(ast.parse("A = {'add', 'gather', 'scatter'}\nB = ('add', 'x', 'gather')")) == [1]
