"""Every kind of op that has rules of its own: one row with its cost, fusion, partitioning rule and constraints.

A field that names a function is resolved by the package above that has it: `sharding_rule` in `ir.extra_rules`, `rule` and its
variants in `partition.op_rules`, `flops` in `cost.compute`. An op without a row follows its result, is charged for its bytes and
is listed in the report.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12


@dataclasses.dataclass(frozen=True)
class OpTraits:
    """One kind of op, by its name in StableHLO or CHLO without the dialect, or by ours for an op that shardfn inserts."""

    name: str
    flops: str
    """What one device computes: `none`, `per_element`, or a function of `cost.compute.FLOPS`."""
    fusion: str
    """`cheap` (recomputed for each reader), `expensive` (fused into a single reader), `view` (no work), `slice` (a view where it
    slices nothing), `contraction`, or `none`."""
    has_own_time: bool = True
    """False where the time is counted elsewhere: the ops of a loop's body, the link of a collective."""
    is_elementwise: bool = False
    """Element i of the result depends on element i of the operands alone."""
    rearranges: bool = False
    """Its result is operand 0 in another form: each element once, in another dtype, order or shape."""
    reads_part: bool = False
    """It reads as much of operand 0 as its result holds."""
    repeats_reads: bool = False
    """It reads an element of operand 0 more than once."""
    updates: int | None = None
    """It updates operand 0 in place; the operand that is as large as what it writes."""
    role: str = ""
    """`collective`, `slice` (inserted by the partitioner), or `token` (no data)."""
    rule: str = "follow_result"
    """Its partitioning rule."""
    gpu_rule: str = ""
    """The rule on GPUs and TPUs, where it differs."""
    tpu_rule: str = ""
    """The rule on TPUs, where it differs from that on GPUs."""
    sharding_rule: str = ""
    """The propagation rule, where Shardy has none."""
    primitives: tuple[str, ...] = ()
    """JAX primitives that become this op. An op with primitives may be constrained."""
    is_listed: bool = False
    """The full report lists its strategy."""
    in_cpu_library: bool = False
    """XLA's CPU backend computes it inside a library reduction (JAX 0.10.2 and 0.12.0.1)."""
    computed_once_on_cpu: bool = False
    """XLA's CPU backend does not recompute it for several readers (JAX 0.10.2)."""
    hoisting: str = "alone"
    """How it leaves a loop that does not change its operands: `alone`, `along` with an op that needs it, or `never`."""
    is_library: bool = False
    """XLA leaves it to a library."""
    branches_on_cpu: bool = False
    """Its code has branches: XLA's CPU backend emits it once, for a single reader."""


def _elementwise(name: str, *primitives: str, fusion: str = "cheap", in_cpu_library: bool = True, flops: str = "per_element",
                 is_added: bool = False, once: bool | None = None) -> OpTraits:  # fmt: skip
    """A row of an op on elements; `is_added` where Shardy has no rule for it."""
    return OpTraits(
        name, flops, fusion, is_elementwise=True, rule="elementwise", in_cpu_library=in_cpu_library, primitives=primitives,
        computed_once_on_cpu=fusion == "expensive" if once is None else once,
        sharding_rule="elementwise_rule" if is_added else "",
    )  # fmt: skip


def _expensive(name: str, *primitives: str, is_added: bool = False, once: bool = True) -> OpTraits:
    return _elementwise(name, *primitives, fusion="expensive", is_added=is_added, once=once)


def _copy(name: str, *primitives: str, **traits: Any) -> OpTraits:
    """A row of an op that copies elements."""
    return dataclasses.replace(OpTraits(name, "none", "cheap", primitives=primitives), **traits)


def _view(name: str, flops: str = "none", **traits: Any) -> OpTraits:
    return dataclasses.replace(OpTraits(name, flops, "view", has_own_time=False), **traits)


def _library(name: str, rule: str = "replicate", **traits: Any) -> OpTraits:
    """A row of an op that XLA leaves to a library; where `rule` replicates, the partitioner cannot shard it."""
    return dataclasses.replace(OpTraits(name, name, "none", rule=rule, is_listed=True, is_library=True), **traits)


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and", "argmax", "argmin")
_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min", "scatter-max")

OP_TRAITS = {
    row.name: row
    for row in (
        # Contractions, reductions and windows.
        OpTraits("dot_general", "contraction", "contraction", rule="dot", tpu_rule="dot_on_tpu",
                 primitives=("dot_general",), is_listed=True),
        OpTraits("convolution", "convolution", "contraction", rule="convolve_in_groups", tpu_rule="convolve_on_tpu",
                 primitives=("conv_general_dilated",), is_listed=True),
        OpTraits("reduce", "per_element", "none", rule="reduce", primitives=_REDUCTIONS, is_listed=True),
        OpTraits("reduce_window", "per_element", "none", rule="windowed", is_listed=True),
        OpTraits("select_and_scatter", "per_element", "none", rule="select_and_scatter", is_listed=True),
        OpTraits("map", "per_element", "none"),
        # Gathers, scatters and slices.
        _copy("gather", "gather", rule="gather", reads_part=True, repeats_reads=True, computed_once_on_cpu=True, is_listed=True),
        OpTraits("scatter", "per_element", "none", rule="scatter", updates=-1, primitives=_SCATTERS, is_listed=True),
        _copy("slice", rule="windowed", reads_part=True, hoisting="along"),
        _copy("dynamic_slice", "dynamic_slice", rule="dynamic_slice", reads_part=True, repeats_reads=True),
        _copy("dynamic_update_slice", rule="dynamic_update_slice", updates=1, branches_on_cpu=True),
        _copy("pad", rule="windowed", branches_on_cpu=True),
        _copy("concatenate", "concatenate", rule="concatenate", branches_on_cpu=True),
        # Ours: two slices of one array, concatenated the other way round (`jnp.roll`).
        _copy("rotate", rule="rotate", branches_on_cpu=True),
        _copy("reverse", rule="reverse", hoisting="along"),
        # Other moves of elements.
        _copy("broadcast_in_dim", repeats_reads=True, in_cpu_library=True, hoisting="along"),
        _copy("iota", in_cpu_library=True, hoisting="along"),
        _copy("transpose", "transpose", rearranges=True, in_cpu_library=True, hoisting="along"),
        dataclasses.replace(_elementwise("convert", flops="none"), rearranges=True),
        _elementwise("bitcast_convert", flops="none", in_cpu_library=False),
        _elementwise("copy", flops="none", in_cpu_library=False, is_added=True),
        _view("reshape", rule="reshape", rearranges=True, sharding_rule="empty_rule", primitives=("reshape", "squeeze"),
              hoisting="along"),
        _view("optimization_barrier", rule="barrier", sharding_rule="pairwise_rule"),
        _view("propagation_barrier", sharding_rule="elementwise_rule"),
        _view("sharding_constraint", sharding_rule="elementwise_rule"),
        _view("bitcast", "per_element"),  # ours: an operand of a matmul with more dims than a matrix, on CPU
        _view("swapped", "per_element"),  # ours: a transposed operand that a matmul reads as it is, on CPU
        # Library calls.
        _library("sort", "sort"),
        _library("top_k", gpu_rule="follow_batch", sharding_rule="batch_rule"),
        _library("fft", "replicate" if IS_BEFORE_JAX_0_12 else "follow_result", tpu_rule="follow_result",
                 primitives=("fft",)),
        _library("cholesky", gpu_rule="follow_result"),
        _library("triangular_solve", gpu_rule="triangular_solve"),
        OpTraits("ragged_dot", "ragged_dot", "none"),
        _library("rng_bit_generator"),
        _library("rng", flops="rng_bit_generator", hoisting="never"),
        # Elementwise ops with constraints.
        _elementwise("add", "add", "add_any"),
        _elementwise("multiply", "mul", "square", "integer_pow"),
        _elementwise("subtract", "sub"),
        _elementwise("negate", "neg"),
        _expensive("divide", "div"),
        _expensive("exponential", "exp"),
        _expensive("log", "log"),
        _expensive("logistic", "logistic"),
        _expensive("tanh", "tanh"),
        _expensive("sqrt", "sqrt"),
        _expensive("rsqrt", "rsqrt"),
        # Other elementwise ops.
        *map(_elementwise, ("abs", "ceil", "floor", "maximum", "minimum", "round_nearest_even", "round_nearest_afz",
                            "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign")),
        *(_elementwise(name, in_cpu_library=False) for name in (
            "and", "clamp", "compare", "complex", "imag", "is_finite", "not", "or", "real", "reduce_precision", "select", "xor")),
        _elementwise("square", is_added=True),
        # Ours: adds up the parts of a split-K matmul, inside its reader.
        dataclasses.replace(_elementwise("add_parts"), has_own_time=False),
        *map(_expensive, ("atan2", "cbrt", "exponential_minus_one", "log_plus_one", "power", "remainder")),
        *(_expensive(name, once=False) for name in ("cosine", "popcnt", "sine")),
        *(_expensive(name, is_added=True, once=name != "tan") for name in (
            "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "digamma", "erf", "erf_inv", "erfc", "lgamma", "sinh",
            "tan", "mhlo.erf", "mhlo.tan")),
        *(OpTraits(name, "", "none", sharding_rule="elementwise_rule") for name in (
            "bessel_i1e", "conj", "is_inf", "is_neg_inf", "is_pos_inf", "next_after", "polygamma", "zeta", "composite")),
        # Control flow.
        *(OpTraits(name, "none", "none", has_own_time=False, rule="", is_listed=name == "shard_map", hoisting="never")
          for name in (
            "while", "case", "shard_map")),
        *(OpTraits(name, "per_element", "none", has_own_time=False, role="token", rule="", hoisting="never") for name in (
            "after_all", "create_token", "partition_id", "replica_id")),
        # What the partitioner inserts, or the user writes in a `shard_map`.
        *(OpTraits(name, "none", "none", has_own_time=False, role="collective", rule="") for name in (
            "all_gather", "all_to_all", "collective_permute")),
        *(OpTraits(name, "per_element", "none", has_own_time=False, role="collective", rule="") for name in (
            "all_reduce", "reduce_scatter")),
        OpTraits("all_slice", "none", "slice", role="slice", rule=""),
        OpTraits("reshard", "none", "slice", sharding_rule="elementwise_rule"),
    )
}  # fmt: skip
"""The rows. An op that XLA treats like another one is a word in that one's group."""


def _names(**traits: Any) -> frozenset[str]:
    return frozenset(n for n, row in OP_TRAITS.items() if all(getattr(row, field) == v for field, v in traits.items()))


COLLECTIVE_OPS = _names(role="collective")
"""The ops by which devices send to each other; `Collective.kind` has the same names with hyphens."""
RESHARDING_OPS = COLLECTIVE_OPS | _names(role="slice")
"""The ops that the partitioner inserts to reshard a value or to reduce partial sums."""
CONTRACTIONS = _names(fusion="contraction")
"""Matmuls and convolutions."""
TOKEN_OPS = _names(role="token")
CHEAP, EXPENSIVE, VIEWS, SLICES = (_names(fusion=kind) for kind in ("cheap", "expensive", "view", "slice"))
ELEMENTWISE = _names(is_elementwise=True)
PARTIAL_READS = _names(reads_part=True)
REARRANGING = _names(rearranges=True)
REPEATED_READS = _names(repeats_reads=True)
UPDATES = {name: row.updates for name, row in OP_TRAITS.items() if row.updates is not None}
"""Ops that update operand 0 in place, each with the operand that is as large as the update."""
CONSTRAINABLE = {name: frozenset(row.primitives) for name, row in OP_TRAITS.items() if row.primitives}
"""Ops that may be constrained, each with the JAX primitives that become it."""
LISTED = _names(is_listed=True)
LIBRARY = _names(is_library=True)
IN_CPU_LIBRARY = _names(in_cpu_library=True)
COMPUTED_ONCE_ON_CPU = _names(computed_once_on_cpu=True)
BRANCHES_ON_CPU = _names(branches_on_cpu=True)
HOISTED_ALONG, NEVER_HOISTED = _names(hoisting="along"), _names(hoisting="never")
UNTIMED = _names(has_own_time=False)
HAS_OWN_RULE = frozenset(
    name for name, row in OP_TRAITS.items() if row.rule not in ("", "follow_result", "elementwise")
)
"""Ops that the partitioner works on by a rule of their own."""
HAS_COST = frozenset(name for name, row in OP_TRAITS.items() if row.flops)
