"""The families of training steps that plans are judged on, each at three sizes and with layouts written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from examples.models import abstract, dlrm, gpt2, llama, mindspore, mlp, moe_lm, resnet, t5, vit
from examples.models.layouts import Expert


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model. `donated` are the arguments whose place the step's results take."""

    name: str
    make: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
    """From a size to a step and its arguments."""
    hand_written: Callable[[Any, int], dict[str, Expert]]
    """From a size and a device count to layouts by name; "data parallel" is always among them."""
    tiny: Any
    small: Any
    large: Any
    donated: tuple[int, ...] = (0, 1)

    def on_paper(self, size: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step of a size, and the shapes of its arguments."""
        return abstract(self.make, size)


def with_layers(size: Any, layers: int) -> Any:
    """A size with so many layers, or blocks in each stage; as it is where it has neither.

    >>> with_layers(gpt2.TINY, 1).layers, with_layers({"batch": 16}, 1)
    (1, {'batch': 16})
    """
    counted = next((field for field in ("layers", "blocks") if hasattr(size, field)), None)
    return dataclasses.replace(size, **{counted: layers}) if counted else size


def _mindspore(name: str, tiny: mindspore.Config, size: mindspore.Config) -> Iterator[Family]:
    for train in (True, False):
        small, big = (dataclasses.replace(s, train=train) for s in (tiny, size))
        shown = name if train else f"{name} forward"
        yield Family(shown, mindspore.make, mindspore.experts, small, big, big, donated=())


_SCAN = {"layers": 4, "scan": True}
_TINY_MLP = {"batch": 16, "d_in": 16, "d_hidden": 32, "d_out": 16, "train": True}

FAMILIES = {
    family.name: family
    for family in (
        Family("mlp", lambda sizes: mlp.make(**sizes), lambda sizes, n: mlp.experts(n, **sizes),
               _TINY_MLP, mlp.SMALL, mlp.LARGE, (0,)),
        Family("gpt2", gpt2.make, gpt2.experts, gpt2.TINY, gpt2.small(), gpt2.large()),
        Family("gpt2 scanned", gpt2.make, gpt2.experts, dataclasses.replace(gpt2.TINY, scan=True),
               dataclasses.replace(gpt2.small(), **_SCAN), dataclasses.replace(gpt2.large(), scan=True)),
        Family("llama", llama.make, llama.experts, llama.TINY, llama.small(), llama.large()),
        Family("vit", vit.make, vit.experts, vit.TINY, vit.small(), vit.large()),
        Family("resnet", resnet.make, resnet.experts, resnet.TINY, resnet.small(), resnet.large(), (0, 1, 2)),
        Family("moe", moe_lm.make, moe_lm.experts, moe_lm.TINY, moe_lm.small(), moe_lm.large()),
        Family("dlrm", dlrm.make, dlrm.experts, dlrm.TINY, dlrm.small(), dlrm.large(), (0,)),
        Family("t5", t5.make, t5.experts, t5.TINY, t5.small(), t5.large()),
        *_mindspore("mindspore mlp", mindspore.TINY_MLP, mindspore.MLP),
        *_mindspore("mindspore transformer", mindspore.TINY_TRANSFORMER, mindspore.TRANSFORMER),
    )
}  # fmt: skip
