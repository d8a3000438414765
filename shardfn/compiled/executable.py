"""A compiled program as data: collectives, FLOPs and memory of one executable.

The collectives are read from the optimised HLO text, in the forms that XLA's CPU, GPU and TPU backends print.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.stages import Compiled as Executable

from shardfn.compiled.hlo import (
    COLLECTIVES,
    REDUCERS,
    Computation,
    Instruction,
    Module,
    called,
    modules,
    replica_groups,
)
from shardfn.cost.collectives import bytes_sent
from shardfn.frontend.closed_over import ClosedOverArray
from shardfn.ir.partitioned import Collective


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call of a compiled function on one device. A size is `None` if the backend does not report it."""

    collectives: tuple[Collective, ...]
    flops: float
    """FLOPs of matmuls and convolutions, two for a multiply-add, times the iterations of their loops."""
    argument_bytes: int | None
    output_bytes: int | None
    temp_bytes: int | None
    alias_bytes: int | None
    """Bytes of donated arguments that outputs reuse."""
    peak_bytes: int | None
    diagnostics: tuple[str, ...] = ()
    """What the numbers above omit or estimate."""
    constants: tuple[tuple[tuple[int, ...], int], ...] = ()
    """The constant arrays in the program: their dimensions, sorted, and bytes. XLA's sizes leave them out."""

    def bytes_of(self, closed_over: Sequence[ClosedOverArray]) -> int:
        """Bytes of those arrays that a function closes over which are constants of the program; XLA fuses uniform ones."""
        left = collections.Counter(self.constants)
        wanted = collections.Counter((tuple(sorted(array.shape)), array.bytes) for array in closed_over)
        return sum(size * count for (_, size), count in (left & wanted).items())

    def together(self, platform: str) -> int | None:
        """Bytes of one device's main memory that a call takes, or None if a size is unknown.

        It is the sum of the sizes, with donated arguments once. On TPU libtpu counts temporaries that share memory more than
        once, and its own peak includes vector memory: the smaller of both is taken. On CPU XLA's peak omits temporaries and is
        not used.

        Args:
          platform: cpu, gpu or tpu.

        >>> made = Compiled((), 0.0, 100, 80, 50, 80, 140)
        >>> made.together("cpu"), made.together("tpu")
        (150, 140)
        """
        if self.argument_bytes is None or self.output_bytes is None or self.temp_bytes is None:
            return None
        total = self.argument_bytes + self.output_bytes + self.temp_bytes - (self.alias_bytes or 0)
        return min(total, self.peak_bytes or total) if platform == "tpu" else total


def read(compiled: Executable, assumed_trips: int = 1) -> Compiled:
    """Read an executable: collectives and operations from its HLO text, bytes from its memory analysis.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returned.
      assumed_trips: how often loops are counted whose length is not known before they run.

    >>> import jax, jax.numpy as jnp
    >>> read(jax.jit(jnp.dot).lower(jnp.ones((8, 4)), jnp.ones((4, 2))).compile()).flops
    128.0
    """
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = (
        list(_found(text, assumed_trips))
        if text
        else ["this backend shows no HLO: collectives and operations are unknown"]
    )
    sizes = {ours: getattr(memory, theirs, None) for ours, theirs in _SIZES.items()}
    return Compiled(
        collectives=tuple(x for x in found if isinstance(x, Collective)),
        flops=float(sum(x for x in found if isinstance(x, int))),
        diagnostics=tuple(dict.fromkeys(x for x in found if isinstance(x, str))),
        constants=tuple(_constants(text or "")),
        **sizes,
    )


def collectives(hlo_text: str) -> tuple[Collective, ...]:
    """The collectives of one or several optimised HLO modules, in program order from each entry computation.

    `bytes_sent` follows from the operand on each device; several operands of one collective become one flat shape.
    `trips` multiplies the loops around it. `where` is the line of the instruction or, if XLA kept none, of the nearest
    instruction with one. Element types are named as in MLIR. A loop of unknown length counts once, and every branch of a
    conditional counts: `read` reports both.

    >>> [found] = collectives('''HloModule m, num_partitions=8
    ... ENTRY %main (x: f32[4,2]) -> f32[16,2] {
    ...   %x = f32[4,2]{1,0} parameter(0)
    ...   ROOT %g = f32[16,2]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
    ... }''')
    >>> found.kind, found.group_size, found.bytes_sent
    ('all-gather', 4, 96)
    """
    return tuple(x for x in _found(hlo_text) if isinstance(x, Collective))


def instruction_lines(hlo_text: str) -> dict[str, str]:
    """The user's line of each instruction of an optimised HLO module, by its name, as `file:line`; of an instruction without one
    that of the nearest one with a line, where there is one.

    >>> instruction_lines('''HloModule m
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} negate(%x), metadata={op_name="neg" source_file="f.py" source_line=3}
    ... }''')["y"]
    'f.py:3'
    """
    return {
        name: _where(module, it) or _nearby(module, computation, name)
        for module in modules(hlo_text)
        for computation in module.computations.values()
        for name, it in computation.items()
        if it.opcode not in ("parameter", "get-tuple-element", "tuple", "constant")
    }


_Shape = tuple[str, tuple[int, ...]]
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _shapes(text: str) -> list[_Shape]:
    """The arrays of a type, tuples flattened: `(f32[2]{0}, s8[])` holds two."""
    return [(kind, tuple(int(d.strip(" <=")) for d in dims.split(",") if d)) for kind, dims in _SHAPE.findall(text)]


def _operand_shapes(computation: Computation, operand: tuple[str, str]) -> list[_Shape]:
    name, written = operand
    return _shapes(written) or (_shapes(computation[name].type) if name in computation else [])


def _bytes(shape: _Shape) -> int:
    kind, dims = shape
    width = re.search(r"\d+", kind)  # f8e4m3fn, bf16, c64: the first number is the bits; a token has none
    bits = 8 if kind == "pred" else int(width[0]) if width else 0
    return -(-math.prod(dims) * bits // 8)


def _mlir(kind: str) -> str:
    """The element type as MLIR writes it: `s32` is `i32`, `u8` is `ui8`, `f8e5m2` is `f8E5M2`."""
    if kind.startswith(("f8", "f4")):
        return kind[0] + kind[1:].upper()
    names = {"pred": "i1", "c64": "complex<f32>", "c128": "complex<f64>"}
    return names.get(kind) or re.sub(r"^u(?=\d)", "ui", re.sub(r"^s(?=\d)", "i", kind))


def _constants(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    for module in modules(text):
        for it in (it for computation in module.computations.values() for it in computation.values()):
            if it.opcode == "constant":
                yield from ((tuple(sorted(shape[1])), _bytes(shape)) for shape in _shapes(it.type) if shape[1])


def _found(text: str, assumed_trips: int = 1) -> Iterator[Collective | int | str]:
    """Collectives, operation counts (int) and diagnostics (str), once for each call site."""
    for module in modules(text):
        yield from _walk(module, module.entry, 1, "", set(), 0, assumed_trips)


def _walk(
    module: Module, name: str, trips: int, caller: str, channels: set[object], fused: int, assumed: int
) -> Iterator[Collective | int | str]:
    """One computation and what it calls, inside `fused` fusions. Loops of unknown length count `assumed` times.

    `channels` are those seen so far in the fusions of one run and of its callers, with the kinds and shapes of their
    collectives: libtpu gives one channel to several."""
    computation = module.computations.get(name, {})
    for key, it in computation.items():
        opcode = it.opcode.removesuffix("-start")
        if opcode.endswith(("-done", "-update")):  # the second half of an asynchronous instruction
            continue
        if opcode in COLLECTIVES:
            channel = _number(r", channel_id=(\d+)", it.attributes)
            is_alone = fused == 1 and name.startswith(_SCATTERED)
            if fused and channel is not None and not is_alone:
                # A TPU's fusions that start, accompany and finish one collective all repeat it, also within a loop.
                shapes = tuple(tuple(_operand_shapes(computation, operand)) for operand in it.operands)
                if (channel, opcode, shapes) in channels:
                    continue
                channels.add((channel, opcode, shapes))
            yield from _collective(module, name, key, trips, caller)
            continue
        if opcode in _FLOPS or opcode == "custom-call":
            yield from _operations(computation, it, trips)
        inside_of = () if opcode in REDUCERS else called(it).values()
        where = _where(module, it) or caller
        runs = _trip_count(module, computation, it) if opcode == "while" else 1
        inside = fused + (opcode == "fusion")
        rounds, seen = trips * (assumed if runs is None else runs), channels if inside else {*channels}
        inner = [x for c in inside_of for x in _walk(module, c, rounds, where, seen, inside, assumed)]
        if runs is None and inner:
            count = f"{assumed} times, as assumed_trips says" if assumed > 1 else "once"
            yield f"loop at {where or 'an unknown line'} runs an unknown number of times: counted {count}"
        if opcode == "conditional" and inner:
            yield f"conditional at {where or 'an unknown line'}: every branch is counted, though one runs"
        yield from inner


_SCATTERED = "all-reduce-scatter"
"""How libtpu names the computation of a reduce-scatter."""


def _collective(module: Module, name: str, key: str, trips: int, caller: str) -> Iterator[Collective | str]:
    computation, it = module.computations[name], module.computations[name][key]
    opcode = it.opcode.removesuffix("-start")
    kind, counted = COLLECTIVES[opcode]
    if kind == "all-reduce" and name.startswith(_SCATTERED):  # a TPU's reduce-scatter: fused with a slice
        kind = "reduce-scatter"
    if pairs := re.search(r"source_target_pairs=\"?\{([\d,{} ]*)\}", it.attributes):
        size = _linked(pairs[1])
    elif opcode == "send":  # to the host
        return
    else:
        size = max(map(len, replica_groups(it.attributes, module.devices)))
    shapes = [s for operand in it.operands[:counted] for s in _operand_shapes(computation, operand)]
    if opcode == "ragged-all-to-all":
        shapes = sorted(shapes, key=_bytes)[:1]
    if not shapes:
        yield f"{key}: its operands have no shape in the text, so its bytes are not counted"
    flat = (sum(math.prod(dims) for _, dims in shapes),)
    yield Collective(
        kind=kind,
        axes=(),
        group_size=size,
        shape=shapes[0][1] if len(shapes) == 1 else flat,
        dtype="+".join(dict.fromkeys(_mlir(dtype) for dtype, _ in shapes)),
        bytes_sent=bytes_sent(kind, size, sum(map(_bytes, shapes))),
        trips=trips,
        where=_where(module, it) or _nearby(module, computation, key) or caller,
    )


def _linked(pairs: str) -> int:
    """Devices that the pairs `{0,1},{1,2}` of a permutation link, directly or through others."""
    groups: list[set[str]] = []
    for pair in (set(pair) for pair in re.findall(r"(\d+),(\d+)", pairs)):
        joined = pair.union(*(group for group in groups if group & pair))
        groups = [group for group in groups if not group & pair] + [joined]
    return max(map(len, groups), default=1)


def _where(module: Module, it: Instruction) -> str:
    if frame := _number(r"\bstack_frame_id=(\d+)", it.attributes):
        return module.lines.get(frame, "")
    source = re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', it.attributes)
    return f"{source[1]}:{source[2]}" if source else ""


def _nearby(module: Module, computation: Computation, key: str) -> str:
    """The line of the nearest instruction that feeds this one; else of one that uses it; else of its reduction."""
    feeds = {name: [operand for operand, _ in it.operands] for name, it in computation.items()}
    users: dict[str, list[str]] = {}
    for user, names in feeds.items():
        for name in names:
            users.setdefault(name, []).append(user)
    for links in (feeds, users):
        ring, seen = [key], {key}
        while ring:
            ring = [n for n in dict.fromkeys(n for m in ring for n in links.get(m, ())) if n in feeds and n not in seen]
            seen.update(ring)
            if line := next(filter(None, (_where(module, computation[n]) for n in ring)), ""):
                return line
    reduction = [_root(module.computations.get(c, {})) for c in called(computation[key]).values()]
    return next((_where(module, root) for root in reduction if root), "")


def _trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """XLA's own count or, as TPU text has none, that of `for i in range(start, stop, step)` with constants."""
    known = _number(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    condition, body = (module.computations.get(called(loop).get(role, ""), {}) for role in ("condition", "body"))
    test, after = _root(condition), _root(body)
    before = computation.get(loop.operands[0][0])
    if known is not None or not (test and after and before):
        return known
    if test.opcode != "compare" or "direction=LT" not in test.attributes or {before.opcode, after.opcode} != {"tuple"}:
        return None
    counter, stop = (_value(condition, name) for name, _ in test.operands)
    if not isinstance(counter, str) or not isinstance(stop, int):
        return None
    start = _value(computation, before.operands[int(counter)][0])
    add = _source(body, after.operands[int(counter)][0])
    terms = [_value(body, name) for name, _ in add.operands] if add and add.opcode == "add" else []
    steps = [term for term in terms if isinstance(term, int) and term > 0]
    return max(0, -(-(stop - start) // steps[0])) if isinstance(start, int) and counter in terms and steps else None


def _root(computation: Computation) -> Instruction | None:
    return next((it for it in computation.values() if it.is_root), None)


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction that computes a value, looking through copies."""
    it = computation.get(name)
    while it and it.opcode in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
        it = computation.get(it.operands[0][0])
    return it


def _value(computation: Computation, name: str) -> int | str | None:
    """An integer constant; of an element of the computation's parameter, its index as text."""
    it = _source(computation, name)
    if it and it.opcode == "constant":
        return _number(r"^(-?\d+)$", it.operands[0][0])
    if it and it.opcode == "get-tuple-element" and computation[it.operands[0][0]].opcode == "parameter":
        return str(_number(r", index=(\d+)", it.attributes))
    return None


def _operations(computation: Computation, it: Instruction, trips: int) -> Iterator[int | str]:
    target = re.search(r'custom_call_target="([^"]*)"', it.attributes)
    name = f"{it.opcode} {target[1]}" if target else it.opcode
    if target and target[1] in _NO_ARITHMETIC:
        return
    count = next((count for prefix, count in _FLOPS.items() if name.startswith(prefix)), None)
    shapes = [_operand_shapes(computation, operand) for operand in it.operands] + [_shapes(it.type)]
    if count is not None:
        with contextlib.suppress(LookupError, ValueError):  # a form of it that is not known here
            yield trips * count(it.attributes, [leaves[0][1] for leaves in shapes if leaves])
            return
    yield f"{name}: its operations are not counted"


def _dot_flops(attributes: str, shapes: Sequence[tuple[int, ...]]) -> int:
    dims = re.search(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([^}\]]*)", attributes)
    contracted = [shapes[0][int(d)] for d in re.findall(r"\d+", dims[1])] if dims else []
    return 2 * math.prod(shapes[-1]) * math.prod(contracted)


def _convolution_flops(image: int, kernel: int, result: int) -> Callable[[str, Sequence[tuple[int, ...]]], int]:
    """Counts a convolution; the arguments are the positions of image, kernel and result in `(*operands, result)`.

    Window positions on padding or between dilated elements are left out, as in XLA's own cost analysis: a TPU writes a
    batched matmul as a convolution whose window slides over the batch, where most positions are padding.
    """

    def flops(attributes: str, shapes: Sequence[tuple[int, ...]]) -> int:
        labels = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)[0]
        parts = zip(labels, (shapes[image], shapes[kernel], shapes[result]), strict=True)
        inputs, weights, outputs = (dict(zip(names, dims, strict=True)) for names, dims in parts)
        written = re.search(r"window=\{([^}]*)\}", attributes)
        window = dict(word.split("=") for word in written[1].split()) if written else {}
        columns = [window[key].split("x") if key in window else itertools.repeat(default) for key, default in _WINDOW]
        total = 2 * outputs["b"] * outputs["f"] * weights["i"]
        for k, row in enumerate(zip(*columns, strict=False) if window else ()):
            size, stride, pad, gap, spread = (int(text.split("_")[0]) for text in row)
            at = np.arange(outputs[str(k)]) * stride - pad
            last = (inputs[str(k)] - 1) * gap
            hits = (at + tap * spread for tap in range(size))
            total *= sum(int(np.sum((x >= 0) & (x <= last) & (x % gap == 0))) for x in hits)
        return total

    return flops


_WINDOW = (("size", "1"), ("stride", "1"), ("pad", "0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))

# Opcode, with the beginning of a custom call's target: how its operations are counted.
_FLOPS: dict[str, Callable[[str, Sequence[tuple[int, ...]]], int]] = {
    "dot": _dot_flops,
    "custom-call __cublas$gemm": _dot_flops,
    "custom-call __cublas$lt$matmul": _dot_flops,
    "convolution": _convolution_flops(0, 1, -1),
    "custom-call __cudnn$convForward": _convolution_flops(0, 1, -1),
    "custom-call __cudnn$convBiasActivationForward": _convolution_flops(0, 1, -1),
    "custom-call __cudnn$convBackwardInput": _convolution_flops(-1, 1, 0),
    "custom-call __cudnn$convBackwardFilter": _convolution_flops(0, -1, 1),
}

_NO_ARITHMETIC = frozenset(
    {"AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast"}
    | {"PartialReduce", "Sharding", "TopK", "X64Combine", "X64SplitHigh", "X64SplitLow"}
)

_SIZES: dict[str, Any] = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "temp_bytes": "temp_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
}
