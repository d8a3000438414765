"""What XLA compiled: the HLO forms of three backends, and programs compiled here for eight devices."""

import dataclasses
import math
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn.compiled.executable
from shardfn.compiled.executable import Compiled, collectives, read

FRAMES = """
FileNames
1 "/home/me/train.py"
2 "/env/lib/python3.12/site-packages/flax/linear.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=80 end_line=80 column=1 end_column=9}
3 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=%d}
2 {file_location_id=2 parent_frame_id=%d}
3 {file_location_id=3 parent_frame_id=%d}
4 {file_location_id=2 parent_frame_id=%d}

"""
SUM = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

"""


def module(entry: str, before: str = "", tables: str = "", devices: int = 8) -> str:
    """An optimised module of the given instructions, each `name = type opcode(...)`; the last is the root."""
    *lines, root = entry.strip().splitlines()
    body = "".join(f"  {line.strip()}\n" for line in lines) + f"  ROOT {root.strip()}\n"
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}\n{tables}\n{before}"
    return f"{head}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}}}\n"


def seen(text: str) -> list[tuple]:
    return [(c.kind, c.group_size, c.shape, c.dtype, c.bytes_sent, c.trips) for c in collectives(text)]


def told(text: str | None) -> Compiled:
    executable = types.SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: None)
    return read(cast(jax.stages.Compiled, executable))


def flops(text: str) -> float:
    return told(text).flops


def diagnostics(text: str) -> list[str]:
    return list(told(text).diagnostics)


GROUPS = {
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": 2,
    "replica_groups={{0,1,2,3,4,5,6,7}}": 8,
    "replica_groups={}": 8,
    "channel_id=3": 8,
    "replica_groups=[4,2]<=[8]": 2,
    "replica_groups=[2,4]<=[4,2]T(1,0)": 4,
    "replica_groups=mesh['a'=2,'b'=4] {'b'}": 4,
    "replica_groups=mesh['a'=2,'b'=4] {'a','b'}": 8,
    "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}": 4,
    "replica_groups=mesh['a'=8] {'a':(2)4}": 4,
    "replica_groups=mesh['a'=8,'b'=4] {'a':(4)2,'b'}": 8,
}


@pytest.mark.parametrize(("written", "size"), GROUPS.items())
def test_groups(written, size):
    text = module(f"""%p = f32[8]{{0}} parameter(0)
        %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {written}, use_global_device_ids=true, to_apply=%add""")
    assert seen(text) == [("all-reduce", size, (8,), "f32", 2 * (size - 1) * 32 // size, 1)]


PAIRS = {"": (1, 0), "{0,0},{1,1}": (1, 0), "{0,1}": (2, 32), "{0,1},{4,5},{1,2},{5,6},{2,3},{6,7}": (4, 32)}


@pytest.mark.parametrize(("pairs", "expected"), PAIRS.items())
def test_a_permutation_links_devices_and_sends_its_operand(pairs, expected):
    text = module(f"""%p = f32[8]{{0}} parameter(0)
        %r = f32[8]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={{{pairs}}}""")
    assert seen(text) == [("collective-permute", expected[0], (8,), "f32", expected[1], 1)]


TYPES = {
    "pred": (1, "i1"),
    "s8": (1, "i8"),
    "u64": (8, "ui64"),
    "s32": (4, "i32"),
    "bf16": (2, "bf16"),
    "f16": (2, "f16"),
    "f64": (8, "f64"),
    "f8e4m3fn": (1, "f8E4M3FN"),
    "f8e5m2": (1, "f8E5M2"),
    "c64": (8, "complex<f32>"),
    "c128": (16, "complex<f64>"),
    "s4": (0.5, "i4"),
}


@pytest.mark.parametrize(("hlo", "expected"), TYPES.items())
def test_element_types(hlo, expected):
    size, mlir = expected
    text = module(f"""%p = {hlo}[5,3]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
        %r = {hlo}[20,3]{{1,0:T(8,128)(2,1)}} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={{0}}""")
    assert seen(text) == [("all-gather", 4, (5, 3), mlir, 3 * math.ceil(15 * size), 1)]


FORMS = {
    "merged all-reduce": (
        """%a = f32[16,8]{1,0} parameter(0)
        %b = f32[8]{0} parameter(1)
        %r = (f32[16,8]{1,0}, /*index=1*/f32[8]{0}) all-reduce(%a, /*index=1*/%b), replica_groups={}, to_apply=%add""",
        [("all-reduce", 8, (136,), "f32", 952, 1)],
    ),
    "merged element types": (
        """%a = f32[4]{0} parameter(0)
        %b = bf16[4]{0} parameter(1)
        %r = (f32[8]{0}, bf16[8]{0}) all-gather(%a, %b), replica_groups=[4,2]<=[8], dimensions={0}""",
        [("all-gather", 2, (8,), "f32+bf16", 24, 1)],
    ),
    "operands with types": (
        """%a = bf16[4]{0} parameter(0)
        %r = bf16[1]{0} reduce-scatter(bf16[4]{0:T(256)} %elsewhere), replica_groups={{0,1,2,3}}, to_apply=%add""",
        [("reduce-scatter", 4, (4,), "bf16", 6, 1)],
    ),
    "all-to-all in parts": (
        """%a = f32[16,2]{1,0} parameter(0)
        %r = (f32[16,2]{1,0}, f32[16,2]{1,0}) all-to-all(%a, %a), replica_groups={{0,1},{2,3}}""",
        [("all-to-all", 2, (64,), "f32", 128, 1)],
    ),
    "GPU start and done": (
        """%a = f32[2,8]{1,0} parameter(0)
        %s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}
        %d = f32[8,8]{1,0} all-gather-done(%s)
        %t = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%d), replica_groups=[2,4]<=[8], to_apply=%add
        %e = f32[2,8]{1,0} reduce-scatter-done(%t)
        %u = (f32[2,8]{1,0}, f32[2,8]{1,0}, u32[], u32[]) collective-permute-start(%e), source_target_pairs={{0,1}}
        %g = f32[2,8]{1,0} collective-permute-done(%u)""",
        [
            ("all-gather", 4, (2, 8), "f32", 192, 1),
            ("reduce-scatter", 4, (8, 8), "f32", 192, 1),
            ("collective-permute", 2, (2, 8), "f32", 64, 1),
        ],
    ),
    "send and receive": (
        """%a = f32[8]{0} parameter(0)
        %t = token[] after-all()
        %s = (f32[8]{0}, u32[], token[]) send(%a, %t), frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
        %h = (f32[8]{0}, u32[], token[]) send(%a, %t), is_host_transfer=true
        %d = token[] send-done(%s)""",
        [("collective-permute", 2, (8,), "f32", 32, 1)],
    ),
    "rarer kinds": (
        """%a = f32[8,4]{1,0} parameter(0)
        %i = s32[4]{0} parameter(1)
        %w = f32[32,4]{1,0} parameter(2)
        %r = f32[8,4]{1,0} ragged-all-to-all(%w, %a, %i, %i, %i, /*index=5*/%i), replica_groups={{0,1,2,3}}
        %b = f32[8,4]{1,0} collective-broadcast(%r), replica_groups=[2,4]<=[8]""",
        [("all-to-all", 4, (8, 4), "f32", 96, 1), ("collective-permute", 4, (8, 4), "f32", 128, 1)],
    ),
}


@pytest.mark.parametrize(("entry", "expected"), FORMS.values(), ids=FORMS)
def test_forms(entry, expected):
    assert seen(module(entry, SUM)) == expected


def test_async_start_calls_the_collective():
    before = """%wrapped (w: bf16[64]) -> bf16[8] {
  %w = bf16[64]{0} parameter(0)
  ROOT %rs = bf16[8]{0} reduce-scatter(%w), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}, execution_thread="main"

"""
    text = module(
        """%p = bf16[64]{0} parameter(0)
        %s = ((bf16[64]{0}), bf16[8]{0}, u32[]) async-start(%p), calls=%wrapped
        %u = ((bf16[64]{0}), bf16[8]{0}, u32[]) async-update(%s), calls=%wrapped
        %d = bf16[8]{0} async-done(%u), calls=%wrapped""",
        SUM + before,
    )
    assert seen(text) == [("reduce-scatter", 8, (64,), "bf16", 112, 1)]


def test_tpu_reduce_scatter_is_a_fused_all_reduce():
    before = """%all-reduce-scatter.clone.1 (i: bf16[64,8]) -> bf16[8,8] {
  %i = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %r = bf16[64,8]{1,0:T(8,128)(2,1)} all-reduce(%i), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %z = u32[] constant(0)
  ROOT %s = bf16[8,8]{1,0:T(8,128)(2,1)} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={8,8}
}

"""
    text = module(
        """%p = bf16[64,8]{1,0} parameter(0)
        %f = bf16[8,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.clone.1, metadata={stack_frame_id=3}""",
        SUM + before,
        FRAMES % (1, 2, 1, 4),
    )
    [found] = collectives(text)
    assert seen(text) == [("reduce-scatter", 8, (64, 8), "bf16", 896, 1)]
    assert found.where == "/home/me/train.py:9"  # from the fusion: the all-reduce has no line


def test_tpu_reduce_scatters_may_share_a_channel():
    before = "".join(
        f"""%all-reduce-scatter.{n} (i: f32[{rows},128]) -> f32[{rows // 8},128] {{
  %i = f32[{rows},128]{{1,0}} parameter(0)
  %r = f32[{rows},128]{{1,0}} all-reduce(%i), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  %z = u32[] constant(0)
  ROOT %s = f32[{rows // 8},128]{{1,0}} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={{{rows // 8},128}}
}}

"""
        for n, rows in enumerate((64, 128, 128))
    )
    calls = "\n".join(
        f"""%p{n} = f32[{rows},128]{{1,0}} parameter({n})
        %f{n} = f32[{rows // 8},128]{{1,0}} fusion(%p{n}), kind=kCustom, calls=%all-reduce-scatter.{n}"""
        for n, rows in enumerate((64, 128, 128))
    )
    found = [(kind, shape) for kind, _, shape, *_ in seen(module(calls, SUM + before))]
    assert found == [("reduce-scatter", (64, 128)), ("reduce-scatter", (128, 128)), ("reduce-scatter", (128, 128))]


def test_tpu_async_collective_fusions_repeat_one_collective():
    gather = "f32[8,4]{1,0} all-gather(%p), channel_id=8, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}"
    before = "".join(
        f"%{name} (p: f32[1,4]) -> f32[8,4] {{\n  %p = f32[1,4]{{1,0}} parameter(0)\n  %g = {gather}\n{rest}}}\n\n"
        for name, rest in {
            "start": '  ROOT %c = (f32[1,4]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"\n',
            "async_collective_fusion.26": "  %k = f32[4,4]{1,0} parameter(1)\n  ROOT %m = f32[8,4]{1,0} "
            "convolution(%g, %k), dim_labels=bf_io->bf\n",
            "done": '  ROOT %c = f32[8,4]{1,0} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"\n',
        }.items()
    )
    text = module(
        """%q = f32[1,4]{1,0} parameter(0)
        %a = (f32[1,4]{1,0}) fusion(%q), kind=kCustom, calls=%start
        %b = f32[8,4]{1,0} fusion(%q, %q), kind=kOutput, calls=%async_collective_fusion.26
        %c = f32[8,4]{1,0} fusion(%q), kind=kCustom, calls=%done""",
        before,
    )
    assert seen(text) == [("all-gather", 8, (1, 4), "f32", 112, 1)]
    assert flops(text) == 2 * 8 * 4 * 4
    assert diagnostics(text) == []


def test_tpu_async_collective_that_goes_on_in_a_loop_runs_once():
    gather = "f32[8,4]{1,0} all-gather(%p), channel_id=8, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}"
    fused = "".join(
        f"%{name} (p: f32[1,4]) -> f32[8,4] {{\n  %p = f32[1,4]{{1,0}} parameter(0)\n  ROOT %g = {gather}\n}}\n\n"
        for name in ("start", "accompany")
    )
    body = """%body (s: (s32[], f32[1,4])) -> (s32[], f32[1,4]) {
  %s = (s32[], f32[1,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1,4]{1,0} get-tuple-element(%s), index=1
  %a = f32[8,4]{1,0} fusion(%x), kind=kOutput, calls=%accompany
  %own = f32[1,4]{1,0} collective-permute(%x), channel_id=9, source_target_pairs={{0,1}}
  ROOT %t = (s32[], f32[1,4]{1,0}) tuple(%i, %own)
}

%test (s: (s32[], f32[1,4])) -> pred[] {
  %s = (s32[], f32[1,4]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

"""
    text = module(
        """%q = f32[1,4]{1,0} parameter(0)
        %b = f32[8,4]{1,0} fusion(%q), kind=kCustom, calls=%start
        %n = s32[] constant(0)
        %t = (s32[], f32[1,4]{1,0}) tuple(%n, %q)
        %w = (s32[], f32[1,4]{1,0}) while(%t), condition=%test, body=%body, """
        """backend_config={"known_trip_count":{"n":"3"}}""",
        fused + body,
    )
    assert [(c.kind, c.trips) for c in collectives(text)] == [("all-gather", 1), ("collective-permute", 3)]


def test_what_a_program_takes_together():
    made = Compiled((), 0.0, 100, 80, 50, 80, 140)
    assert (made.together("cpu"), made.together("cuda"), made.together("tpu")) == (150, 150, 140)
    assert dataclasses.replace(made, peak_bytes=400).together("tpu") == 150  # vector memory is in that peak
    assert dataclasses.replace(made, peak_bytes=None).together("tpu") == 150
    assert dataclasses.replace(made, temp_bytes=None).together("cpu") is None


def loop(limit: str, start: str, step: str, attributes: str = "", direction: str = "LT") -> str:
    before = f"""%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %one = s32[] constant({step})
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %copy = s32[] copy(%i)
  %next = s32[] add(%copy, %one)
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %r = f32[8]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%next, %r)
}}

%test (s: (s32[], f32[8])) -> pred[] {{
  %n = s32[] {limit}
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %c = pred[] compare(%i, %n), direction={direction}
}}

"""
    return module(
        f"""%p = f32[8]{{0}} parameter(0)
        %zero = s32[] {start}
        %start = s32[] copy(%zero)
        %t = (s32[], f32[8]{{0}}) tuple(%start, %p)
        %w = (s32[], f32[8]{{0}}) while(%t), condition=%test, body=%body{attributes}""",
        SUM + before,
        FRAMES % (1, 2, 1, 4),
    )


LOOPS = {
    "as XLA says": (loop("parameter(1)", "parameter(1)", "1", ', backend_config={"known_trip_count":{"n":"12"}}'), 12),
    "TPU: from its constants": (loop("constant(4)", "constant(0)", "1"), 4),
    "TPU: in steps": (loop("constant(8)", "constant(1)", "2"), 4),
    "never": (loop("constant(3)", "constant(3)", "1"), 0),
}


@pytest.mark.parametrize(("text", "trips"), LOOPS.values(), ids=LOOPS)
def test_trips(text, trips):
    assert [c.trips for c in collectives(text)] == [trips]
    assert diagnostics(text) == []


UNKNOWN = {
    "limit": loop("parameter(1)", "constant(0)", "1", ", metadata={stack_frame_id=1}"),
    "start": loop("constant(4)", "parameter(1)", "1", ", metadata={stack_frame_id=1}"),
    "direction": loop("constant(4)", "constant(0)", "1", ", metadata={stack_frame_id=1}", "NE"),
}


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN)
def test_a_loop_of_unknown_length_counts_once_and_says_so(text):
    assert [c.trips for c in collectives(text)] == [1]
    assert diagnostics(text) == ["loop at /home/me/train.py:7 runs an unknown number of times: counted once"]


@pytest.mark.parametrize(
    "tables", [FRAMES % (1, 2, 1, 4), FRAMES % (0, 1, 0, 3)], ids=["parents one up", "parents as they are"]
)
@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ("stack_frame_id=1", "/home/me/train.py:7"),
        ("stack_frame_id=2", "/home/me/train.py:7"),  # a library called from line 7
        ("stack_frame_id=4", "/home/me/train.py:9"),  # the same place in it, called from line 9
        ('op_name="jit(f)/add" source_file="/home/me/old.py" source_line=3', "/home/me/old.py:3"),
        ("", ""),
    ],
)
def test_where_is_the_users_line(tables, metadata, line):
    text = module(
        f"""%p = f32[8]{{0}} parameter(0), metadata={{op_name="x"}}
        %r = f32[8]{{0}} all-reduce(%p), replica_groups={{}}, to_apply=%add, metadata={{{metadata}}}""",
        SUM,
        tables,
    )
    assert [c.where for c in collectives(text)] == [line]


def test_frames_of_this_library_are_never_the_line():
    ours = (FRAMES % (1, 2, 1, 4)).replace(
        "/env/lib/python3.12/site-packages/flax/linear.py", shardfn.compiled.executable.__file__
    )
    line = "%r = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add, metadata={stack_frame_id="
    text = module("%p = f32[8]{0} parameter(0)\n" + line + "4}", SUM, ours)
    assert [c.where for c in collectives(text)] == ["/home/me/train.py:9"]
    alone = ours.replace("/home/me/train.py", shardfn.compiled.executable.__file__)
    text = module("%p = f32[8]{0} parameter(0)\n" + line + "4}", SUM, alone)
    assert [c.where for c in collectives(text)] == [""]


def test_without_a_line_the_nearest_instruction_lends_its_own():
    tables = FRAMES % (1, 2, 1, 4)
    fed = """%p = f32[8]{0} parameter(0)
        %n = f32[8]{0} negate(%p), metadata={stack_frame_id=3}
        %c = f32[8]{0} copy(%n)
        %r = f32[8]{0} all-reduce(%c), replica_groups={}, to_apply=%add
        %u = f32[8]{0} negate(%r), metadata={stack_frame_id=1}"""
    used = fed.replace("metadata={stack_frame_id=3}", "metadata={}")
    assert [c.where for c in collectives(module(fed, SUM, tables))] == ["/home/me/train.py:9"]
    assert [c.where for c in collectives(module(used, SUM, tables))] == ["/home/me/train.py:7"]


def test_several_modules_and_none():
    one = module("%p = f32[8]{0} parameter(0)\n%r = f32[8]{0} all-reduce(%p), to_apply=%add", devices=2)
    two = module("%p = f32[8]{0} parameter(0)\n%r = f32[8]{0} all-reduce(%p), to_apply=%add", devices=4)
    assert [c.group_size for c in collectives(f"{one}\n\n{two}")] == [2, 4]
    assert collectives("") == ()


ARITHMETIC = {
    "dot": (
        "%r = f32[4,2,6]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
        ("f32[4,2,8]", "f32[4,8,6]"),
        2 * 4 * 2 * 6 * 8,
    ),
    "cublas": (
        '%r = (f32[2,6]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        ("f32[2,8]", "f32[8,6]"),
        2 * 2 * 6 * 8,
    ),
    "TPU matrix product": (
        "%r = f32[2,6]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf",
        ("f32[2,8]", "f32[6,8]"),
        192,
    ),
    "TPU batched product": (  # 4 x 2 products of 16x8 by 8x32
        "%r = f32[4,2,16,32]{3,2,1,0} convolution(%a, %b), window={size=4x2 stride=3x1 lhs_dilate=4x2}, "
        "dim_labels=01bf_01oi->01bf",
        ("f32[4,2,16,8]", "f32[4,2,32,8]"),
        2 * 4 * 2 * 16 * 8 * 32,
    ),
    "convolution": (  # three taps along 5, but one falls outside at each end
        "%r = f32[1,5,4]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
        ("f32[1,5,2]", "f32[3,2,4]"),
        2 * 13 * 4 * 2,
    ),
    "strided convolution": (  # three results of two taps; the last tap falls outside
        "%r = f32[1,3,4]{2,1,0} convolution(%a, %b), window={size=2 stride=2 pad=0_1}, dim_labels=b0f_0io->b0f",
        ("f32[1,5,2]", "f32[2,2,4]"),
        2 * 5 * 4 * 2,
    ),
    "dilated kernel": (  # taps at -1, +2 and +5 of each of five
        "%r = f32[1,5,4]{2,1,0} convolution(%a, %b), window={size=3 pad=1_5 rhs_dilate=3}, dim_labels=b0f_0io->b0f",
        ("f32[1,5,2]", "f32[3,2,4]"),
        2 * (4 + 3 + 0) * 4 * 2,
    ),
    "cudnn forward": (
        "%r = (f32[1,5,4]{2,1,0}, u8[0]{0}) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, "
        'custom_call_target="__cudnn$convForward"',
        ("f32[1,5,2]", "f32[3,2,4]"),
        2 * 13 * 4 * 2,
    ),
    "cudnn kernel gradient": (
        "%r = (f32[3,2,4]{2,1,0}, u8[0]{0}) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, "
        'custom_call_target="__cudnn$convBackwardFilter"',
        ("f32[1,5,2]", "f32[1,5,4]"),
        2 * 13 * 4 * 2,
    ),
    "cudnn image gradient": (
        "%r = (f32[1,5,2]{2,1,0}, u8[0]{0}) custom-call(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, "
        'custom_call_target="__cudnn$convBackwardInput"',
        ("f32[1,5,4]", "f32[3,2,4]"),
        2 * 13 * 4 * 2,
    ),
}


@pytest.mark.parametrize(("line", "operands", "expected"), ARITHMETIC.values(), ids=ARITHMETIC)
def test_operations(line, operands, expected):
    text = module(f"%a = {operands[0]} parameter(0)\n%b = {operands[1]} parameter(1)\n{line}")
    assert flops(text) == expected
    assert diagnostics(text) == []


def test_what_is_not_counted_is_said():
    text = module("""%a = f32[8]{0} parameter(0)
        %b = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
        %c = f32[8]{0} custom-call(%b), custom_call_target="__cudnn$convForward", dim_labels=b0f?_0io?->b0f?""")
    assert diagnostics(text) == [
        "custom-call tpu_custom_call: its operations are not counted",
        "custom-call __cudnn$convForward: its operations are not counted",
    ]
    lost = module("%r = f32[8]{0} all-reduce(%gone), replica_groups={}, to_apply=%add")
    assert diagnostics(lost) == ["r: its operands have no shape in the text, so its bytes are not counted"]


# --- programs compiled here: eight devices, a grid of a=2 by b=4 ---


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def scanned(weights, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def scanned_twice(weights, x):
    return jax.lax.scan(lambda h, _: (scanned(weights, h), None), x, None, length=5)[0]


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def psums(x, y):
    return jax.lax.psum(x, "b"), jax.lax.psum(y, "b")


MANUAL = {  # function, in_specs, out_specs
    "permute": (lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 3), (3, 0)]), P("b"), P("b")),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "b", 1, 0, tiled=True), P("b"), P(None, "b")),
    "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "b", tiled=True), P(), P("b")),
    "merged psums": (psums, P("b"), P()),
}

# Function or name in MANUAL; shapes and specs; spec of the result; collectives; operations on one device.
LIVE: dict[str, tuple[Any, tuple, Any, list, int]] = {
    "contracted dim sharded": (
        jnp.matmul,
        (((32, 64), P(None, "b")), ((64, 16), P("b"))),
        P(),
        [("all-reduce", 4, (32, 16), "f32", 3072, 1)],
        2 * 32 * 16 * 16,
    ),
    "rows sharded": (jnp.matmul, (((32, 64), P("a")), ((64, 16), P())), P("a"), [], 2 * 16 * 64 * 16),
    "gather": (jnp.negative, (((1024, 8), P(("a", "b"))),), P(), [("all-gather", 8, (128, 8), "f32", 28672, 1)], 0),
    "sort": (jnp.sort, (((1024,), P("b")),), P(), [("all-gather", 4, (256,), "f32", 3072, 1)], 0),
    "scan": (
        scanned,
        (((4, 64, 64), P(None, "b")), ((32, 64), P("a"))),
        None,
        [("all-reduce", 4, (16, 64), "f32", 6144, 4)],
        2 * 16 * 16 * 64 * 4,
    ),
    "nested scans": (
        scanned_twice,
        (((4, 64, 64), P(None, "b")), ((32, 64), P("a"))),
        None,
        [("all-reduce", 4, (16, 64), "f32", 6144, 20)],
        2 * 16 * 16 * 64 * 20,
    ),
    "halo": (
        convolved,
        (((8, 3, 32, 32), P(None, None, "b")), ((16, 3, 3, 3), P())),
        P(None, None, "b"),
        [("collective-permute", 4, (8, 3, 1, 32), "f32", 3072, 1)] * 2,
        2 * 8 * 16 * 3 * (8 * 3) * (3 * 32 - 2),  # the halo rows are real, the two columns at the sides are not
    ),
    "permute": ("permute", (((64, 8), P("b")),), None, [("collective-permute", 4, (16, 8), "f32", 512, 1)], 0),
    "all-to-all": ("all-to-all", (((64, 8), P("b")),), None, [("all-to-all", 4, (128,), "f32", 384, 1)], 0),
    "psum_scatter": ("psum_scatter", (((64, 8), P()),), None, [("reduce-scatter", 4, (64, 8), "f32", 1536, 1)], 0),
    "merged psums": (
        "merged psums",
        (((64, 8), P("b")), ((32,), P("b"))),
        None,
        [("all-reduce", 4, (136,), "f32", 816, 1)],
        0,
    ),
}


def compiled(mesh, function, arguments, result=None, **options):
    if isinstance(function, str):
        body, in_specs, out_specs = MANUAL[function]
        function = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    out = None if result is None else NamedSharding(mesh, result)
    return jax.jit(function, out_shardings=out, **options).lower(*avals).compile()


@pytest.mark.parametrize(("function", "arguments", "result", "expected", "operations"), LIVE.values(), ids=LIVE)
def test_compiled_here(mesh, function, arguments, result, expected, operations):
    executable = compiled(mesh, function, arguments, result)
    found = read(executable)
    assert [(c.kind, c.group_size, c.shape, c.dtype, c.bytes_sent, c.trips) for c in found.collectives] == expected
    assert found.flops == operations
    assert found.diagnostics == ()
    assert all(c.axes == () for c in found.collectives)
    assert found.collectives == collectives(executable.as_text() or "")


def test_lines_of_this_file(mesh):
    found = read(compiled(mesh, scanned, LIVE["scan"][1]))
    assert [c.where for c in found.collectives] == [f"{__file__}:{scanned.__code__.co_firstlineno + 1}"]


def test_a_gradient_through_a_scan(mesh):
    found = read(compiled(mesh, jax.grad(lambda w, x: scanned(w, x).sum()), LIVE["scan"][1]))
    assert {c.trips for c in found.collectives} == {4}
    assert {c.where.rpartition(":")[0] for c in found.collectives} == {__file__}
    assert found.flops == 3 * LIVE["scan"][4]  # forward, and backward to the activations and to the weights


def test_a_while_loop_and_a_conditional_are_findings(mesh):
    def until(w, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: x @ w, x)

    found = read(compiled(mesh, until, (((64, 64), P(None, "b")), ((32, 64), P("a")))))
    [finding] = found.diagnostics
    assert finding.endswith("runs an unknown number of times: counted once") and __file__ in finding

    def either(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ (w * 2))

    found = read(compiled(mesh, either, LIVE["contracted dim sharded"][1]))
    assert [f for f in found.diagnostics if f.endswith("every branch is counted, though one runs")]
    assert len([c for c in found.collectives if c.shape == (32, 16)]) == 2


def test_memory(mesh):
    found = read(compiled(mesh, jnp.matmul, LIVE["contracted dim sharded"][1], P()))
    assert (found.argument_bytes, found.output_bytes, found.alias_bytes) == (3072, 2048, 0)
    assert found.temp_bytes is not None
    donated = read(compiled(mesh, lambda x: x + 1, (((64, 8), P("b")),), P("b"), donate_argnums=0))
    assert donated.alias_bytes == 64 * 8 * 4 // 4


def test_a_backend_that_tells_nothing():
    found = told(None)
    assert (found.collectives, found.flops) == ((), 0.0)
    assert (found.argument_bytes, found.peak_bytes) == (None, None)
    assert found.diagnostics == ("this backend shows no HLO: collectives and operations are unknown",)


@pytest.mark.tpu
def test_tpu():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("d",), axis_types=(AxisType.Auto,))
    weights = jax.ShapeDtypeStruct((4, 2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "d")))
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("d")))

    def step(weights, x):
        return weights - jax.grad(lambda w: (scanned(w, x).astype(jnp.float32) ** 2).sum())(weights)

    found = read(jax.jit(step, out_shardings=weights.sharding).lower(weights, x).compile())
    shard, full = 256 * 2048 * 2, 2048 * 2048 * 2
    sent = sorted((c.kind, c.bytes_sent, c.trips) for c in found.collectives)
    assert sent == [("all-gather", 7 * shard, 4)] * 2 + [("reduce-scatter", 7 * full // 8, 4)]
    assert found.flops == 3 * 4 * 2 * math.prod((128, 2048, 2048))
    assert found.diagnostics == ()
