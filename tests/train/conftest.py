"""The fixtures that the tests of training share."""

from tests.train.regression import alone

__all__ = ["alone"]
