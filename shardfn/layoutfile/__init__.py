"""Layout files.

| module | holds |
|---|---|
| `files` | read a layout file or a recipe, write one, apply one to arrays |
| `toml` | TOML text to a `LayoutFile` and back |
| `plan_file` | a `Plan` as a `LayoutFile` |
| `mindspore_json` | MindSpore's strategy JSON |

`shardfn.runtime.layout_check` compares a layout file with a model. The data type `LayoutFile` and its rules are in
`shardfn.planning.layout_rules`.
"""

from shardfn.layoutfile.files import LayoutFileError, layout_shardings, read_layout, recipes, write_layout

__all__ = [
    "LayoutFileError",
    "layout_shardings",
    "read_layout",
    "recipes",
    "write_layout",
]
