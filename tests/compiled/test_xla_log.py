"""XLA's warnings of full rematerialisation become notes with the array and the line."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardfn import plan
from shardfn.compiled.xla_log import rematerialisations


def test_verify_names_the_array_and_line_of_a_full_rematerialisation():
    x = jax.ShapeDtypeStruct((16, 16, 16), "float32")
    made = plan(lambda x: jnp.sin(x) * 2, x, in_strategy=((1, 8, 1),), out_strategy=((2, 1, 4),), device="cpu:8")
    report = made.verify()
    (note,) = report.to_dict()["compiled"]["diagnostics"]
    assert note.startswith("XLA replicates f32[16,2,16] of `")
    assert " at test_xla_log.py:" in note
    assert note.endswith("to reshard it from (1, 8, 1) to (2, 1, 4) (full rematerialisation)")
    assert "XLA replicates f32[16,2,16]" in str(report)


def test_rematerialisations_of_other_lines_and_replicas_are_read_as_they_are():
    log = (
        "I0 something else\nW1 [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        "{devices=[4,1,1]<=[4]} to {devices=[1,2,1,2]<=[4] last_tile_dim_replicate} efficiently for HLO operation "
        '%copy = f32[16,2,1]{2,1,0} copy(%p), sharding={replicated}, metadata={op_name="jit(f)/add" stack_frame_id=6}. As'
    )
    assert rematerialisations(f"{log}\n{log}") == [
        "XLA replicates f32[16,2,1] of `add` to reshard it from (4, 1, 1) to (1, 2, 1) (full rematerialisation)"
    ]
    assert rematerialisations("I0 nothing") == []
    named = log.replace("{devices=[4,1,1]<=[4]}", "{mesh['a'=2,'b'=4], [{'a', 'b':(1)2}, {}, {}]}")
    assert "from (4, 1, 1) to (1, 2, 1)" in rematerialisations(named)[0]
