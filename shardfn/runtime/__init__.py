"""From a plan to a jitted function."""
