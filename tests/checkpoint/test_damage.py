"""Files of checkpoints that are changed, cut short or lost."""

import json
import random
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn import checkpoint
from shardfn.errors import CheckpointError, CheckpointFileError
from shardfn.planning.layout_rules import LayoutFile
from tests.checkpoint.states import files, mesh, plain


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    on = NamedSharding(mesh(2, 4), P("a", "b"))
    return {
        "w": jax.device_put(rng.normal(size=(64, 512)).astype("float32"), on),
        "zeros": jax.device_put(jnp.zeros((16, 16)), on),
        "n": 3,
    }


def largest(folder):
    """The file with the chunks of the arrays of a step."""
    return max(files(folder), key=lambda file: file.stat().st_size)


def hit(run, path, damage, like):
    """What happens to a restore when a file is changed: the error, or None where all is as it was."""
    data = path.read_bytes()
    damage(path, data)
    try:
        return None, plain(checkpoint.restore(run, like=like))
    except (CheckpointFileError, CheckpointError) as error:
        return error, None
    finally:
        path.write_bytes(data)


@pytest.mark.slow
def test_a_changed_bit_is_found_or_without_effect(tmp_path, small):
    checkpoint.save(tmp_path, small)
    whole = plain(checkpoint.restore(tmp_path, like=small))
    draw = random.Random(0)
    found = 0
    for file in files(tmp_path / "0" / "state"):
        size = file.stat().st_size
        for at in sorted(draw.sample(range(size), min(size, 12))):
            bit = 1 << draw.randrange(8)

            def flip(path, data, at=at, bit=bit):
                path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])

            error, back = hit(tmp_path, file, flip, small)
            if error is None:
                assert file != largest(tmp_path), f"byte {at} of {file}"
                jax.tree.map(np.testing.assert_array_equal, back, whole)
            else:
                found += 1
                assert str(tmp_path / "0") in str(error) or "`like`" in str(error), f"byte {at} of {file}: {error}"
    assert found > 30


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/*", "ocdbt.process_0/d/*", "_METADATA"])
@pytest.mark.parametrize("part", [None, 0, 0.5, 0.99])
def test_a_file_cut_short_is_told(tmp_path, small, name, part):
    checkpoint.save(tmp_path, small)
    file = max((tmp_path / "0" / "state").glob(name), key=lambda file: file.stat().st_size)

    def cut(path, data):
        path.unlink() if part is None else path.write_bytes(data[: int(len(data) * part)])

    error, _ = hit(tmp_path, file, cut, small)
    assert isinstance(error, CheckpointFileError)
    assert ("`w`" if name.startswith("ocdbt") else str(tmp_path / "0" / "state")) in str(error)
    jax.tree.map(np.testing.assert_array_equal, plain(checkpoint.restore(tmp_path)), plain(small))


def holed(file):
    """Change a byte in every 100 of a file."""
    data = np.fromfile(file, np.uint8)
    data[50::100] ^= 1
    data.tofile(file)


def test_all_damage_is_told_at_once(tmp_path, small):
    small = {**small, "v": small["w"] + 1}
    checkpoint.save(tmp_path, small)
    holed(largest(tmp_path))
    for call in (checkpoint.restore, checkpoint.verify):
        with pytest.raises(CheckpointFileError) as error:
            call(tmp_path)
        assert {"`w` is damaged", "`v` is damaged"} <= {
            problem.what.partition(" in ")[0] for problem in error.value.problems
        }
    assert "float32[64, 512]" in str(error.value)
    with pytest.raises(CheckpointFileError, match="is damaged"):
        checkpoint.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize("layout", [None, LayoutFile(mesh=(("x", 4),), others=("x", "..."))])
def test_a_copy_of_damaged_arrays_is_one_error_and_leaves_nothing(tmp_path, small, layout, capfd):
    checkpoint.save(tmp_path / "run", small)
    holed(largest(tmp_path / "run"))
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "new" / "copy", tmp_path / "there"):
        with pytest.raises(CheckpointFileError, match="`w` is damaged"):
            checkpoint.relayout(tmp_path / "run", target, layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]
    assert not list((tmp_path / "there").iterdir())
    assert "Traceback" not in capfd.readouterr().err


def test_only_what_is_read_is_checked(tmp_path, small):
    checkpoint.save(tmp_path, small)
    holed(largest(tmp_path))
    assert checkpoint.restore(tmp_path, only="n")["n"] == 3
    with pytest.raises(CheckpointFileError):
        checkpoint.verify(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"tree_metadata": {"a": 3}}', "\0" * 9, '"x"'])
def test_a_description_of_nonsense(tmp_path, small, text):
    checkpoint.save(tmp_path, small)
    (tmp_path / "0" / "state" / "_METADATA").write_text(text)
    (tmp_path / "0" / "state" / "SHA256SUMS").unlink()
    (tmp_path / "0" / "_CHECKPOINT_METADATA").unlink()  # as another program leaves it
    with pytest.raises(CheckpointFileError, match=r"_METADATA cannot be read"):
        checkpoint.restore(tmp_path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: b"0" + text[1:] if text[:1] != b"0" else b"1" + text[1:], "is damaged"),
        (lambda text: text.replace(b"_METADATA", b"_METADATb"), "is damaged"),
        (lambda text: b"\xff\xfe" + text[2:], "is damaged"),
        (lambda text: text[:100], "is damaged"),
        (lambda text: text[:-1], "is damaged"),
        (lambda text: b"".join(text.splitlines(True)[:2]), "is damaged"),
        (lambda text: b"", "is damaged"),
        (lambda text: None, "is missing"),
    ],
)
def test_damaged_checksums_blame_no_other_file(tmp_path, small, damage, told):
    checkpoint.save(tmp_path, small)
    file = tmp_path / "0" / "state" / "SHA256SUMS"
    text = damage(file.read_bytes())
    file.unlink()
    if text is not None:
        file.write_bytes(text)
    for call in (checkpoint.restore, checkpoint.verify):
        with pytest.raises(CheckpointFileError, match=f"SHA256SUMS {told}") as error:
            call(tmp_path)
        assert len(error.value.problems) == 1


def test_sha256sum_reads_our_checksums(tmp_path, small):
    checkpoint.save(tmp_path, small)
    if program := shutil.which("sha256sum"):
        subprocess.run([program, "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "0" / "state", check=True)


def without_a_row(folder):
    file = folder / "_METADATA"
    data = json.loads(file.read_text())
    del data["tree_metadata"]["('w',)"]
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_a_row, "_METADATA is not the file that was saved"),
        (lambda folder: shutil.rmtree(folder / "array_metadatas"), "array_metadatas/process_0 is missing"),
        (lambda folder: (folder / "_sharding").unlink(), "_sharding is missing"),
    ],
)
def test_a_description_that_is_not_the_one_saved_is_told(tmp_path, damage, told):
    checkpoint.save(tmp_path, {"w": jnp.arange(4.0), "key": jax.random.key(1)})
    damage(tmp_path / "0" / "state")
    for call in (checkpoint.restore, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(CheckpointFileError, match=told):
            call(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\xff", None, "exchanged"], ids=str)
def test_a_damaged_layout_file_is_told(tmp_path, damage):
    layout = LayoutFile(mesh=(("a", 2), ("b", 4)), others=("a", "b"))
    checkpoint.save(tmp_path, {"w": jnp.ones((8, 8))}, layout)
    file = tmp_path / "0" / "layout" / "layout.toml"
    text = file.read_text()
    if damage is None:
        file.unlink()
    else:
        exchanged = text.replace('"a", "b"', '"b", "a"').encode()
        assert exchanged != text.encode()
        file.write_bytes(exchanged if damage == "exchanged" else damage)
    for call in (checkpoint.verify, checkpoint.restore):
        with pytest.raises(CheckpointFileError, match="layout.toml is " + ("missing" if damage is None else "damaged")):
            call(tmp_path)
    assert checkpoint.restore(tmp_path, jax.devices()[0])["w"].shape == (8, 8), "it is not read where a target is given"
    file.write_text(text)
    assert checkpoint.restore(tmp_path)["w"].sharding.spec == jax.sharding.PartitionSpec("a", "b")
    assert checkpoint.verify(tmp_path).has_checksums


def test_a_layout_file_that_was_saved_without_a_checksum_must_be_readable(tmp_path):
    checkpoint.save(tmp_path, {"w": jnp.ones((8, 8))})
    told = tmp_path / "0" / "_CHECKPOINT_METADATA"
    data = json.loads(told.read_text())
    del data["custom_metadata"]["layout_sha256"]
    told.write_text(json.dumps(data))
    assert checkpoint.verify(tmp_path)
    (tmp_path / "0" / "layout" / "layout.toml").write_text("garbage")
    with pytest.raises(CheckpointFileError, match=r"layout\.toml is damaged"):
        checkpoint.verify(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\0" * 64, "[" * 100_000])
def test_a_damaged_description_of_a_step_is_told_and_does_not_keep_the_arrays(tmp_path, text):
    checkpoint.save(tmp_path, {"w": jnp.arange(8.0)})
    told = tmp_path / "0" / "_CHECKPOINT_METADATA"
    told.write_text(text)
    for call in (checkpoint.verify, checkpoint.restore, checkpoint.inspect):
        with pytest.raises(CheckpointFileError, match="_CHECKPOINT_METADATA is damaged"):
            call(tmp_path)
    told.unlink()
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, jax.devices()[0])["w"], jnp.arange(8.0))
