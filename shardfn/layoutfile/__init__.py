"""Layout files: TOML plan files and recipes, and MindSpore's strategy JSON."""

from shardfn.layoutfile.files import LayoutFileError, entries_of, read, recipes, shardings, with_layout, write

__all__ = ["LayoutFileError", "entries_of", "read", "recipes", "shardings", "with_layout", "write"]
