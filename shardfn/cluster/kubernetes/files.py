"""Descriptions and manifests as files: TOML and YAML to dicts, dicts to YAML. YAML needs PyYAML, of the extra `k8s`."""

from __future__ import annotations

import os
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.errors import ClusterError, fail
from shardfn.files import read_bytes
from shardfn.runtime.extras import need

MAX_BYTES = 4 << 20
"""Larger files are no manifests: etcd stores no object above 1.5 MiB."""


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The documents of a TOML or YAML file.

    Args:
      path: the file; `.toml` is TOML, and every other name YAML.

    Returns:
      One dict for each document that is not empty.

    Raises:
      ClusterError: the file is neither, or a document is not a mapping.
      ExtraError: the file is YAML, and PyYAML is not installed.
      OSError: the file cannot be read.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w+", suffix=".yaml") as file:
    ...     print("kind: A\\n---\\nkind: B", file=file, flush=True)
    ...     read(file.name)
    [{'kind': 'A'}, {'kind': 'B'}]
    """
    is_toml = pathlib.Path(path).suffix == ".toml"
    try:
        text = read_bytes(path, MAX_BYTES).decode()
        documents = [tomllib.loads(text)] if is_toml else _yaml(text)
        if wrong := [d for d in documents if not isinstance(d, dict)]:
            raise ValueError(f"a document is no mapping: {str(wrong[0])[:40]}")
    except (ValueError, RecursionError) as error:
        fail(ClusterError, f"{os.fspath(path)} cannot be read as {'TOML' if is_toml else 'YAML'}", where=os.fspath(path),
             why=" ".join(str(error).split()) or type(error).__name__,
             fix="write keys and values, as docs/how-to/kubernetes.md shows")  # fmt: skip
    return documents


def dump(manifests: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """Manifests as one YAML text, which `kubectl apply -f` takes.

    Args:
      manifests: the manifests.
      notes: lines for comments at the beginning.

    Raises:
      ExtraError: PyYAML is not installed.

    >>> print(dump([{"kind": "JobSet", "spec": {"env": [{"name": "N", "value": "1"}]}}], ["made by hand"]))
    # made by hand
    kind: JobSet
    spec:
      env:
      - name: N
        value: '1'
    <BLANKLINE>
    """
    need("yaml", "k8s")
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes values that occur twice in full, and texts of several lines as blocks."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    body = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"# {note}\n" for note in notes) + body


def _yaml(text: str) -> list[Any]:
    need("yaml", "k8s")
    import yaml

    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
