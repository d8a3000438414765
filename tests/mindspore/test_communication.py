"""`init`, `get_rank` and `get_group_size`, as MindSpore has them; in several processes: tests/cluster."""

import pytest

import shardfn.mindspore as ms
from shardfn.errors import ClusterError, NotAvailableError


def test_before_init_the_environment_answers(monkeypatch):
    assert (ms.get_rank(), ms.get_group_size()) == (0, 1)
    monkeypatch.setenv("RANK_ID", "2")
    monkeypatch.setenv("RANK_SIZE", "4")
    assert (ms.get_rank(), ms.get_group_size()) == (2, 4)


def test_init_without_a_group_is_a_group_of_one_however_often():
    for name in (None, "gloo", "mccl"):
        ms.init(name)
    assert (ms.get_rank(), ms.get_group_size()) == (0, 1)
    assert ms.get_auto_parallel_context("device_num") == 1 and ms.get_auto_parallel_context("global_rank") == 0


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        (3, TypeError, "must be a string"),
        ("hccl", RuntimeError, "Ascend"),
        ("mpi", ClusterError, "the backends are nccl, gloo"),
        ("nccl", RuntimeError, "of the kind CPU"),
    ],
)
def test_init_with_a_wrong_backend(name, kind, text):
    with pytest.raises(kind, match=text):
        ms.init(name)


def test_init_with_a_backend_of_another_device_target():
    ms.set_context(device_target="GPU")
    with pytest.raises(ClusterError, match="device_target is GPU"):
        ms.init("gloo")


def test_groups_other_than_the_world():
    assert ms.get_rank("nccl_world_group") == 0
    with pytest.raises(NotAvailableError, match="makes no groups"):
        ms.get_group_size("mine")
    with pytest.raises(TypeError):
        ms.get_rank(3)
