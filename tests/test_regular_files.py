"""Files that are pipes or devices: every reader ends with an error that says so, and waits for nobody."""

import os
import pathlib

import pytest

import shardfn
from shardfn.checkpoint.contents import FILE, read_contents
from shardfn.checkpoint.safetensors_files import read_tensors
from shardfn.cluster.jobs import read_rank_table
from shardfn.cluster.kubernetes import files
from shardfn.cost.devices.chips import load_chip
from shardfn.layoutfile import read_layout
from shardfn.mindspore.ckpt_files import tensors_of
from shardfn.regular_files import read_bytes

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
    FILE: lambda file: read_contents(pathlib.Path(file).parent),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_reader_of_a_pipe_or_a_device_ends_with_an_error(name, kind, tmp_path):
    file = tmp_path / name
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises((shardfn.ShardError, OSError), match="not a regular file"):
        READERS[name](file)


def test_content_over_the_bound_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(9))
    assert read_bytes(file, 9) == bytes(9)
    with pytest.raises(ValueError, match="more than 8 bytes"):
        read_bytes(file, 8)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 8)
