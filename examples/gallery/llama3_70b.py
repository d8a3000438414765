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
Each plan was found on two CPU cores, from shapes alone. The predicted bytes are 1.03, 0.97 and 0.99 times those of libtpu's
programs for the 256 chips, and the predicted peaks 1.11, 0.95 and 1.16 times theirs.

The fewer sequences a batch has, the more the layers are tensor parallel. With one sequence for each chip, tensor parallelism
over `t` chips sends about `(t - 1) * 80` GiB of activations, and FSDP over the others about `380 / t` GiB of weights and
gradients: the sum is least for `t = 2`. The textbook's FSDP over 32 x tensor parallel over 8 is near for an eighth of the
sequences only. There the weights fit unsharded over the 32, so that they are gathered once for a step (ZeRO-1) and not again
for each layer.

FSDP over all 256 chips, the plan of 2026-11-25, sends 800 GiB when it is compiled: libtpu makes an all-reduce of each
all-gather over all chips of a three-dimensional torus, which sends twice the bytes. ZeRO-1 takes the memory of the gathered
weights twice: libtpu copies a donated array that an all-gather replaces.
"""

if __name__ == "__main__":
    show(program)
