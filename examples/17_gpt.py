"""A small GPT on a real text, byte by byte: trained on eight devices, stopped, and resumed from its checkpoint.

Run: python examples/17_gpt.py [--steps 100] [--folder runs/gpt]   (with a folder, a second run resumes where the first stopped)
"""

import argparse
import math
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardfn import checkpoint, train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

TEXT = pathlib.Path(__file__).parent / "text" / "proverbs.txt"
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 64, 4, 64, 16
PERIOD = 25  # steps between checkpoints


# ---- the model: a pytree of arrays, and a loss that is a mean over the batch


def make(vocabulary):
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[0])  # noqa: E731
    block = lambda: {  # noqa: E731
        "qkv": draw(WIDTH, 3, WIDTH),
        "out": draw(WIDTH, WIDTH),
        "up": draw(WIDTH, 4 * WIDTH),
        "down": draw(4 * WIDTH, WIDTH),
        "norms": jnp.ones((2, WIDTH)),
    }
    return {
        "embed": 0.1 * jax.random.normal(next(keys), (vocabulary, WIDTH)),
        "position": 0.1 * jax.random.normal(next(keys), (CONTEXT, WIDTH)),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
    }


def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(x, block):
    b, t, d = x.shape
    q, k, v = (
        h.reshape(b, t, HEADS, d // HEADS) for h in jnp.moveaxis(jnp.einsum("btd,dne->btne", x, block["qkv"]), 2, 0)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, d) @ block["out"]


def logits(params, tokens):
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    for block in params["blocks"]:
        x = x + attention(normed(x, block["norms"][0]), block)
        x = x + jax.nn.gelu(normed(x, block["norms"][1]) @ block["up"]) @ block["down"]
    return normed(x, params["norm"]) @ params["embed"].T


def loss(params, tokens):
    """Of the next byte, for windows of CONTEXT + 1 bytes."""
    found = logits(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()


# ---- the text


def read(path):
    """The text as numbers, and the bytes that they stand for."""
    letters, numbers = np.unique(np.frombuffer(path.read_bytes(), np.uint8), return_inverse=True)
    return numbers.astype(np.int32), letters


def batch(numbers, step):
    """Windows drawn by the number of the step: a run that goes on reads what the run it goes on from would have read."""
    starts = np.random.default_rng(step).integers(0, len(numbers) - CONTEXT - 1, BATCH)
    return numbers[starts[:, None] + np.arange(CONTEXT + 1)]


# ---- training


def optimizer_of(steps):
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, steps // 10, steps, 6e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def trainer(steps):
    """Each device works on its part of the batch; the optimizer's states are sharded over all devices."""
    config = {"optimizer_level": "level2", "parallel_optimizer_threshold": 1}
    return train.step(loss, optimizer_of(steps), mode="data_parallel", parallel_optimizer_config=config)


def run(step, folder, numbers, vocabulary, until, console):
    """Train up to step `until`, from the newest checkpoint where there is one."""
    state, losses = step.init(lambda: make(vocabulary), batch(numbers, 0)), []
    if checkpoint.steps(folder):
        state = checkpoint.restore(folder, like=state)
        console.print(f"goes on from step {int(state.step)} in {folder}")
    first = int(state.step)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    with bar:
        task = bar.add_task("loss -----", total=until, completed=first)
        for i in range(first, until):
            state, value = step(state, batch(numbers, i))
            losses.append(float(value))
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
            if (i + 1) % PERIOD == 0 or i + 1 == until:  # written while the next steps run
                checkpoint.save(folder, state, step=i + 1, keep=2, background=True)
    return state, losses


def unsharded(numbers, vocabulary, steps, count):
    """The first losses of the same run on one device, by optax alone."""
    optimizer, params, found = optimizer_of(steps), jax.jit(make, static_argnums=0)(vocabulary), []
    state = optimizer.init(params)

    @jax.jit
    def one(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for i in range(count):
        params, state, value = one(params, state, batch(numbers, i))
        found.append(float(value))
    return found


def plot(losses, console, rows=10, columns=60):
    """The losses as bars of text, each the mean of the steps it stands for."""
    parts = [float(np.mean(part)) for part in np.array_split(np.array(losses), min(columns, len(losses)))]
    low, high = min(parts), max(parts)
    for row in range(rows):
        level = high - (high - low) * row / rows
        console.print(f"{level:6.2f} |" + "".join("#" if part >= level else " " for part in parts), highlight=False)
    console.print(" " * 7 + "+" + "-" * len(parts) + f" {len(losses)} steps", highlight=False)


def written(params, letters, start, count=120):
    """What the model writes, byte after byte, on one device."""
    params = jax.device_put(params, jax.devices()[0])
    numbers = {byte: i for i, byte in enumerate(letters)}
    text = [numbers[byte] for byte in start.encode()]

    @jax.jit
    def following(window, length, key):
        return jax.random.categorical(key, logits(params, window[None])[0, length - 1] / 0.7)

    for key in jax.random.split(jax.random.key(7), count):
        window = np.zeros(CONTEXT, np.int32)
        seen = text[-CONTEXT:]
        window[: len(seen)] = seen
        text.append(int(following(window, len(seen), key)))
    return bytes(letters[text]).decode()


def where(state):
    """A table of the shardings, and of the bytes on a device."""
    parts = {"parameters": state.params, "optimizer": state.opt_state}
    for name, tree in parts.items():
        leaves = jax.tree.leaves(tree)
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        yield f"{name}: {held:,} of {sum(x.nbytes for x in leaves):,} B on each of {len(jax.devices())} devices"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder")
    given, _ = parser.parse_known_args()
    console = Console()
    numbers, letters = read(TEXT)
    console.print(f"{TEXT.name}: {len(numbers):,} bytes of {len(letters)} kinds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(given.folder or temporary)
        step, losses = trainer(given.steps), []
        if given.folder is None:  # show it stopped half-way: what goes on is the same run
            losses = run(step, folder, numbers, len(letters), given.steps // 2, console)[1]
        state, more = run(step, folder, numbers, len(letters), given.steps, console)
        for line in where(state):
            console.print(line, highlight=False)
        losses += more
        if len(losses) > 1:
            plot(losses, console)
        console.print(written(state.params, letters, "The fear of "), style="italic", highlight=False)
    if given.folder is None:
        np.testing.assert_allclose(losses[:8], unsharded(numbers, len(letters), given.steps, 8), rtol=1e-3)
        assert len(losses) == given.steps and np.mean(losses[-5:]) < 0.65 * losses[0], "it learns"


if __name__ == "__main__":
    main()
