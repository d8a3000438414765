"""Errors of JAX that shardfn explains, by their English texts: JAX gives them no type of their own.

Every text was seen in JAX 0.10.2 and 0.12.0. An error that another release words otherwise comes out as JAX raises it.
"""

from __future__ import annotations

import enum
import re


class JaxError(enum.Enum):
    """A kind of error: the pattern of its text, in which the group `what` is what the error names."""

    TRACED_STATIC = "(?s)Non-hashable static arguments.*Tracer"
    """A `jax.jit` inside has static arguments, and they are traced."""
    NEEDS_VALUE = "concrete value|static integer"
    """The function needs the value of a traced number."""
    NEEDS_ARGUMENTS = "values? of the arguments? (?P<what>.*)"
    """The same, of arguments that it names."""
    CLOSED_OVER_TYPE = "(?s)should match the aval mesh .* for shape (?P<what>[^.]*)"
    """An op reads a closed-over array whose type has Explicit axes."""
    CLOSED_OVER_SHARDING = r"(?s)should match the mesh of sharding .*at source:\s*(?P<what>.*?)\s*$"
    """The same in an op that takes a sharding."""
    TYPES_DIFFER = r"has type (?P<one>\S+) but the corresponding [\w ]+ has type (?P<other>\S+?)[.,]?\s"
    """The branches of a conditional, or what a loop carries in and out, have two types."""
    SHARD_MAP_MESH = "should match the mesh passed to shard_map"
    """A `jax.shard_map` has a mesh of its own with other types of axes."""
    EXPLICIT_AXES_WANTED = "axis names that are of type Auto"
    """A sharding of an array's type names an axis that is not Explicit."""
    DUPLICATE_AXIS = "(?s).* but (?P<what>.*has duplicate entries for.*)"
    """`jax.vmap` puts an axis into a type that has it already."""
    COMMITTED_ELSEWHERE = "does not match the sharding|incompatible"
    """An array is committed to another sharding than that of `jax.jit`."""
    NUMPY_INPUT = "non-trivial shardings for numpy inputs"
    """A NumPy array stands where the sharding spans several processes."""
    COMPILER_OPTION = r"No such compile option: '(?P<what>[^']*)'|While setting option (?P<value>\w+), (?P<why>.*)"
    """XLA has no option of that name, or the option cannot have that value."""
    CUSTOM_CALL = "custom call"
    """The export of an op without a guarantee of compatibility."""

    def match(self, error: BaseException) -> re.Match[str] | None:
        """The match with the text of an error; None if it is another kind.

        >>> JaxError.NEEDS_ARGUMENTS.match(TypeError("it depends on the value of the argument n"))["what"]
        'n'
        """
        return re.search(self.value, str(error))


AXES_OF_TYPE = re.compile(r"@(\([^)]*\)|\w+)")
"""The Explicit axes in JAX's text for a type: `float32[16@data,32]`."""


def statement(error: BaseException) -> str:
    """The text of an error without its place in the source.

    >>> statement(ValueError("a is not b. This error occurs at source: f.py:3"))
    'a is not b'
    """
    return str(error).split(". This error")[0]
