"""The facade for people who come from MindSpore."""
