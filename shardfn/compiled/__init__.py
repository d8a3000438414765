"""What XLA produced: ahead-of-time compilation, the HLO reader, and the comparison with a prediction."""

from shardfn.compiled.executable import Compiled, read

__all__ = ["Compiled", "read"]
