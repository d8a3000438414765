"""MindSpore's `.ckpt` and binary strategy files, made of the messages that are read; literal bytes hold the numbers of the fields."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
import shardfn.mindspore as ms
from shardfn.checkpoint.safetensors_files import read_tensors
from shardfn.errors import CheckpointFileError
from shardfn.layoutfile import mindspore_schema
from shardfn.layoutfile.mindspore_protobuf import strategy_bytes, strategy_rows
from shardfn.layoutfile.mindspore_schema import message
from shardfn.mindspore.ckpt_files import tensors_of

TYPES = {"float32": "Float32", "bfloat16": "BFloat16", "int8": "Int8", "bool": "Bool", "int64": "Int64"}
W = np.arange(32, dtype="float32").reshape(8, 4)


def framed(data):
    """A value as field 1 of a checkpoint."""
    return b"\x0a" + number(len(data)) + data


def number(value):
    """A number as ProtoBuf writes it."""
    return message("Dims", dim=[value]).SerializeToString()[1:]


def value(name, shape, kind, content):
    tensor = message("Tensor", dims=shape, tensor_type=kind, tensor_content=content)
    return framed(message("Value", tag=name, tensor=tensor).SerializeToString())


def entry(name, array, parts=1):
    array = np.asarray(array)
    content, kind = array.tobytes(), TYPES[str(array.dtype)]
    size = -(-len(content) // parts)
    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    return b"".join(value(name, array.shape or (0,), kind, piece) for piece in pieces)


def serve(params, x):
    return x @ params["w"] + params["b"]


def test_tensors_of_a_ckpt_file_have_names_dtypes_and_values(tmp_path):
    arrays = {"net.w": W, "half": np.asarray(W, jnp.bfloat16), "few": np.arange(3, dtype="int8"), "step": np.int64(-7),
              "mask": np.array([True, False])}  # fmt: skip
    content = b"".join(entry(name, x) for name, x in arrays.items())
    content += value("about", (0,), "str", b"a\0\0\0") + value("random_op", (0,), "random_op", b"state")
    (tmp_path / "net.ckpt").write_bytes(content)
    found = tensors_of(tmp_path / "net.ckpt")
    assert list(found) == list(arrays)
    for name, x in arrays.items():
        read = found[name].read(tuple(slice(0, n) for n in x.shape))
        assert (read.dtype, read.shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(read, x)


def test_tensor_in_several_parts_and_a_checksum_are_read(tmp_path):
    checksum = b"crc_num" + (12).to_bytes(10, "big")
    (tmp_path / "net.ckpt").write_bytes(entry("w", W, parts=3) + entry("b", W[0]) + checksum)
    found = tensors_of(tmp_path / "net.ckpt")
    np.testing.assert_array_equal(found["w"].read((slice(2, 5), slice(1, 3))), W[2:5, 1:3])
    np.testing.assert_array_equal(found["b"].read((slice(0, 4),)), W[0])


@pytest.mark.parametrize("magic", [0x7F3A5ED8, 0x7F3A5ED9, 0x7F3A5EDA])
def test_encrypted_ckpt_file_is_refused(tmp_path, magic):
    (tmp_path / "net.ckpt").write_bytes(magic.to_bytes(4, "little") + bytes(60))
    with pytest.raises(CheckpointFileError, match=r"is encrypted(.|\n)*without enc_key"):
        ms.load_distributed_checkpoint(serve, tmp_path / "net.ckpt")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (entry("w", W)[:-5], "the values end at"),
        (b"not a checkpoint at all", "begins no value"),
        (b"\x0a\x04\x12\x7fab", "cannot be read"),
        (b"\x0a" + b"\xff" * 8 + b"\x7f" + b"a", "a value should end at byte 9,223,372,036,854,775,817"),
        (framed(message("Value", tensor=message("Tensor")).SerializeToString()), "a value has no name"),
        (value("w", (-1,), "Int8", b"1"), "the tensor `w` cannot be read"),
        (value("w", (8, 4), "Float32", W.tobytes()[:-4]), "`w` needs 128 bytes, and has 124"),
        (value("w", (8, 4), "Int4", b"1"), "the type 'Int4', which is unknown"),
        (framed(b"\x0a\x05table\x1a\x00"), "`table` is no tensor"),
        (framed(b"\x0a\x01w\x12\x09\x08\x01\x12\x04Int8"), "the bytes of `w` do not end with its value"),
        (framed(b"\x0a\x01w\x12\x0b\x08\x01\x12\x04Int8\x1a\x09a"), "the bytes of `w` do not end with its value"),
        (framed(b"\x0a\x7fw"), "a description has the bytes 2 to 131, and its value ends at 5"),
        (b"\x0a\x06\x0a\x01w\x12\xff\xff", "cannot be read"),
        (entry("w", W) + entry("b", W[0]) + entry("w", W), "holds `w` twice"),
    ],
)
def test_damaged_ckpt_file_is_an_error_that_says_why(tmp_path, content, why):
    (tmp_path / "net.ckpt").write_bytes(content)
    with pytest.raises(CheckpointFileError, match=why):
        tensors_of(tmp_path / "net.ckpt")


def test_ckpt_file_whose_parts_differ_is_an_error(tmp_path):
    content = value("w", (4,), "Float32", b"\0" * 8) + value("w", (4,), "Int32", b"\0" * 8)
    (tmp_path / "net.ckpt").write_bytes(content)
    with pytest.raises(CheckpointFileError, match="different shapes or types"):
        tensors_of(tmp_path / "net.ckpt")


def test_load_distributed_checkpoint_takes_a_ckpt_file_by_mindspores_names(tmp_path):
    (tmp_path / "net.ckpt").write_bytes(entry("params.w", W) + entry("params.b", W[0]) + entry("step", np.int64(3)))
    loaded = ms.load_distributed_checkpoint(
        network=serve,
        checkpoint_filenames=tmp_path / "net.ckpt",
        predict_strategy={"w": (4, 1), "b": (1,)},
        format="ckpt",
    )
    assert sorted(loaded) == ["b", "w"]
    np.testing.assert_array_equal(loaded["w"], W)
    assert loaded["w"].sharding.shard_shape((8, 4)) == (2, 4)


ROWS = {
    "current_stage": 1,
    "parallel_strategy_item": {"MatMul_w": {"stage": 0, "parallel_strategy": [[2, 1], [1, 4]]}},
    "parallel_layout_item": {
        "params.w": {"dev_matrix": [2, 4], "tensor_map": [1, -1], "field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0},
    },
}  # fmt: skip


def test_ranks_of_a_run_in_ckpt_files_are_merged_by_a_binary_strategy(tmp_path):
    for rank in range(8):
        (tmp_path / f"rank_{rank}").mkdir()
        half = W[rank // 4 * 4 :][:4]
        (tmp_path / f"rank_{rank}" / "net-1_10.ckpt").write_bytes(entry("params.w", half) + entry("params.b", W[0]))
    (tmp_path / "strategy.ckpt").write_bytes(strategy_bytes(ROWS))
    loaded = ms.load_distributed_checkpoint(serve, tmp_path, train_strategy_filename=tmp_path / "strategy.ckpt")
    np.testing.assert_array_equal(loaded["w"], W)
    assert ms.rank_list_for_transform(0, tmp_path / "strategy.ckpt") == [0, 4]
    files = ms.transform_checkpoints(tmp_path, tmp_path / "out", "one", tmp_path / "strategy.ckpt")
    np.testing.assert_array_equal(tensors_of(files[0])["params.w"].read((slice(0, 8), slice(0, 4))), W)


def test_binary_strategy_has_the_rows_of_the_json():
    content = strategy_bytes(ROWS)
    assert strategy_rows(content) == ROWS
    assert content[0] == 0x08  # what tells it from text


def test_numbers_of_the_fields_are_those_of_mindspore(tmp_path):
    """Bytes written by hand from the published schemas."""
    strategy = bytes.fromhex(
        "0801"  # current_stage
        "121a0a084d61744d756c5f77" "120e0800" "120408020801" "120408010804"  # a strategy: its name; its stage and dims
        "1a300a08706172616d732e77" "1224" "0a0408020804" "120d080108ffffffffffffffffff01"  # a layout: its name, matrix and map
        "2800" "3000" "38ffffffffffffffffff01"
    )  # fmt: skip
    rows = {
        **ROWS,
        "parallel_layout_item": {"params.w": {**ROWS["parallel_layout_item"]["params.w"], "opt_weight_shard_size": -1}},
    }
    assert (strategy_rows(strategy), strategy_bytes(rows)) == (rows, strategy)
    tensor = bytes.fromhex("0a130a0177120e080208011204496e74381a027f81")  # name; dims, type, content
    (tmp_path / "net.ckpt").write_bytes(tensor)
    read = tensors_of(tmp_path / "net.ckpt")["w"].read((slice(0, 2), slice(0, 1)))
    assert (read.dtype, read.tolist()) == ("int8", [[127], [-127]])


def test_bytes_of_tensors_are_not_read_when_a_ckpt_file_is_opened(tmp_path):
    """A file with holes of 40 GB, of which a row is read."""
    with open(tmp_path / "net.ckpt", "wb") as file:
        for name in "abcdefghij":
            tensor = message("Tensor", dims=[1 << 22, 1 << 10], tensor_type="Int8").SerializeToString()
            tensor += b"\x1a" + number(1 << 32)
            head = message("Value", tag=name).SerializeToString() + b"\x12" + number(len(tensor) + (1 << 32)) + tensor
            file.write(b"\x0a" + number(len(head) + (1 << 32)) + head)
            file.seek(1 << 32, 1)
        file.truncate()
    found = tensors_of(tmp_path / "net.ckpt")
    assert list(found) == list("abcdefghij")
    assert not found["j"].read((slice(1 << 21, (1 << 21) + 1), slice(0, 1 << 10))).any()


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b + b"\x3a\x01x"], ids=["truncated", "unknown field"])
def test_damaged_binary_strategy_is_an_error(tmp_path, damage):
    (tmp_path / "s.ckpt").write_bytes(damage(strategy_bytes(ROWS)))
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        ms.rank_list_for_transform(0, tmp_path / "s.ckpt")
    with pytest.raises(shardfn.ShardError, match="cannot be read"):
        shardfn.plan(serve, *shapes(), layout=tmp_path / "s.ckpt")


def shapes():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")  # noqa: E731
    return {"w": shape(8, 8), "b": shape(8)}, shape(16, 8)


def test_strategy_ckpt_save_file_is_binary_and_is_loaded_again(tmp_path):
    file, text = str(tmp_path / "s.ckpt"), str(tmp_path / "s.json")
    entries = ({"w": (2, 4), "b": (4,)}, (2, 1))
    with ms.auto_parallel(strategy_ckpt_save_file=file):
        shardfn.plan(serve, *shapes(), in_strategy=entries)
    with ms.auto_parallel(strategy_ckpt_save_file=text):
        shardfn.plan(serve, *shapes(), in_strategy=entries)
    rows, same = strategy_rows((tmp_path / "s.ckpt").read_bytes()), json.loads((tmp_path / "s.json").read_text())
    assert rows["parallel_strategy_item"] == same["parallel_strategy_item"]
    assert {k: v["tensor_map"] for k, v in rows["parallel_layout_item"].items()} == {
        k: v["tensor_map"] for k, v in same["parallel_layout_item"].items()
    }
    with ms.auto_parallel(strategy_ckpt_load_file=file):
        plan = shardfn.plan(serve, *shapes())
    assert plan.decision("params/w").strategy == (2, 4)


@pytest.mark.parametrize(
    ("module", "call", "says"),
    [
        (
            "google.protobuf.descriptor_pb2",
            lambda path: tensors_of(path / "x.ckpt"),
            "MindSpore's binary files need protobuf",
        ),
        ("safetensors", lambda path: read_tensors(path / "x.safetensors"), "checkpoints need safetensors"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, module, call, says):
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "x.ckpt").write_bytes(b"\x0a\x00")
    mindspore_schema._classes.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(shardfn.errors.ExtraError, match=f"{says}, which is not installed"):
        call(tmp_path)
