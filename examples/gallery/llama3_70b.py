"""Llama 3 70B: a training step on 256 TPU v5p.

The model is that of `llama3_8b.py` with 80 layers of twice the width. It is planned for three batches: one sequence for each
chip, and 64 or 32 sequences, fewer than there are chips.
"""

import dataclasses

from examples.gallery import Program, show
from examples.gallery.llama3_8b import TINY, Config, step

FULL = Config(layers=80, width=8192, heads=64, hidden=28672, context=4096, batch=256)
BATCHES = {"full": 256, "batch-64": 64, "batch-32": 32}
SIZES = tuple(BATCHES)


def program(size: str) -> Program:
    if size == "tiny":  # half as many sequences as devices
        return step(dataclasses.replace(TINY, batch=4), None)
    return step(dataclasses.replace(FULL, batch=BATCHES[size]), "tpu-v5p:4x8x8")


NOTES = """
The fewer sequences a batch has, the more the search shards the layers by tensor parallelism. With one sequence for each chip,
tensor parallelism over `t` chips sends about `(t - 1) * 80` GiB of activations, and FSDP over the others about `380 / t` GiB of
weights and gradients: the sum is least for `t = 2`. FSDP over 32 x tensor parallel over 8 is right for an eighth of the
sequences.

FSDP over all chips sends twice as much: libtpu makes an all-reduce of each all-gather over all chips of a three-dimensional
torus. The prediction has counted it so since 2026-11-26, and the full batch is no longer FSDP over 256: batch and weights are
sharded together over 2 and 128, 282 GiB sent and 18.6 GiB at the peak, of which libtpu's compile has 0.97 and 0.90. ZeRO-1 fits
the memory only where the weights fit twice: libtpu copies a donated array that an all-gather replaces.
"""

if __name__ == "__main__":
    show(program)
