"""Layout files.

| module | holds |
|---|---|
| `files` | read a layout file or a recipe, write one, apply one to arrays |
| `toml` | TOML text to a `LayoutFile` and back |
| `plan_file` | a `Plan` as a `LayoutFile` |
| `mindspore_json`, `mindspore_protobuf` | MindSpore's strategy files, as JSON and binary |
| `mindspore_schema` | the messages of MindSpore's binary files |

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
