"""Files that are pipes or devices: every reader ends with an error that says so, and waits for nobody."""

import ast
import os
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn import checkpoint, embedding
from shardfn.checkpoint.catalogue import METADATA, read_contents
from shardfn.checkpoint.safetensors_files import read_tensors
from shardfn.cluster.jobs import read_rank_table
from shardfn.cluster.kubernetes import files
from shardfn.cost.devices.chips import load_chip
from shardfn.durable import Database, new_database
from shardfn.files import check_regular, read_bytes
from shardfn.layoutfile import read_layout
from shardfn.mindspore.ckpt_files import tensors_of

READERS = {
    "layout": lambda file: read_layout(str(file)),
    "layout.toml": read_layout,
    "strategy.json": read_layout,
    "strategy.ckpt": read_layout,
    "chip.json": load_chip,
    "ranks.json": read_rank_table,
    "job.toml": files.read,
    "job.yaml": files.read,
    "weights.ckpt": tensors_of,
    "weights.safetensors": read_tensors,
    "model.safetensors.index.json": read_tensors,
    METADATA: lambda file: read_contents(pathlib.Path(file).parent),
}


def _checkpoint(folder):
    checkpoint.save(folder, {"w": jnp.arange(16.0)}, step=0)
    return lambda: checkpoint.restore(folder)


def _verified(folder):
    return _checkpoint(folder) and (lambda: checkpoint.verify(folder))


def _merged(folder):
    return _checkpoint(folder) and (lambda: checkpoint.merge(folder, folder.parent / "one"))


def _table(folder):
    embedding.Table(64, 4, init=np.ones((64, 4), "float32")).save(folder)
    return lambda: embedding.Table(64, 4, init=np.ones((64, 4), "float32")).restore(folder)


def _database(folder):
    with new_database(folder / "a.db", {"a": "b TEXT PRIMARY KEY"}):
        pass
    (folder / "a.db-wal").touch()
    return lambda: Database(folder / "a.db").close()


def _tensors(folder):
    checkpoint.save(folder, {"w": jnp.arange(16.0)}, step=0)
    checkpoint.export_safetensors(folder, folder / "w.safetensors")
    found = read_tensors(folder / "w.safetensors")["w"]
    return lambda: found.read((slice(0, 4),))


SAVES = {
    "arrays": (_checkpoint, "0/state/manifest.ocdbt"),
    "shardings": (_checkpoint, "0/state/_sharding"),
    "arrays that are verified": (_verified, "0/state/manifest.ocdbt"),
    "a process's arrays that are merged": (_merged, "0/state/ocdbt.process_0/manifest.ocdbt"),
    "a table": (_table, "table.db"),
    "a database": (_database, "a.db"),
    "a database's log": (_database, "a.db-wal"),
    "an open safetensors file": (_tensors, "w.safetensors"),
}


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


@needs_pipes
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_reader_of_a_pipe_or_a_device_ends_with_an_error(name, kind, tmp_path):
    file = tmp_path / name
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises((shardfn.ShardError, OSError), match="not a regular file"):
        READERS[name](file)


@needs_pipes
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", SAVES)
def test_reader_of_a_save_with_a_pipe_or_a_device_ends_with_an_error(name, kind, tmp_path):
    make, inside = SAVES[name]
    read = make(tmp_path / "saves")
    file = tmp_path / "saves" / inside
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises((shardfn.ShardError, OSError), match=f"(?s){re.escape(str(file))}.*not a regular file"):
        read()


def test_every_reader_opens_files_by_open_regular():
    """A file of the user's is read by `open_regular`; these modules read what they or shardfn wrote a moment before."""
    own = {"runtime/other_process.py", "report/page.py", "cli/demo_cluster.py"}
    package = pathlib.Path(shardfn.__file__).parent
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if _reads(ast.parse(file.read_text()))}
    assert found == own


def _reads(tree):
    """Whether a module reads a file by its path in another way: `open`, `Path.open`, `Path.read_bytes`, `Path.read_text`."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, owner = getattr(call.func, "attr", getattr(call.func, "id", "")), getattr(call.func, "value", None)
        if name == "read_text" or (name == "read_bytes" and owner is not None):
            return True
        modes = [x.value for x in call.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        if name == "open" and (owner is None or modes) and not set("".join(modes[-1:])) & set("wax"):
            return True
    return False


def test_content_over_the_bound_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(9))
    assert read_bytes(file, 9) == bytes(9)
    with pytest.raises(ValueError, match="more than 8 bytes"):
        read_bytes(file, 8)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 8)
    with pytest.raises(IsADirectoryError):
        check_regular(tmp_path)
    assert check_regular(tmp_path / "missing") is None, "the library says that it is missing"
