"""The parallel context: keys, checks, defaults, atomicity, blocks and threads."""

import asyncio
import contextvars
import dataclasses
import pathlib
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from shardfn import search
from shardfn.errors import ContextError, ContextTypeError, NotAvailableError, ShardError
from shardfn.mindspore import context, context_keys
from shardfn.mindspore.context import (
    ParallelContext,
    auto_parallel,
    current,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    get_ps_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
    set_ps_context,
)
from shardfn.mindspore.context_keys import ParallelMode
from shardfn.mindspore.layout import Layout
from tests.messages import refusal

TABLES = {
    set_auto_parallel_context: context_keys.AUTO_PARALLEL_KEYS,
    set_context: context_keys.RUN_KEYS,
    set_algo_parameters: context_keys.ALGO_KEYS,
    set_ps_context: context_keys.PS_KEYS,
}
GETTERS = {
    set_auto_parallel_context: get_auto_parallel_context,
    set_context: get_context,
    set_algo_parameters: get_algo_parameters,
    set_ps_context: get_ps_context,
}
ROWS = [pytest.param(setter, key, id=key.name) for setter, table in TABLES.items() for key in table.values()]
KEYS_PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "context.md").read_text("utf-8")
READ_ONLY = {"pipeline_scheduler", "pipeline_interleave"}


@pytest.fixture(autouse=True)
def _defaults():
    yield
    context.reset_auto_parallel_context()
    context.reset_context()
    context.reset_algo_parameters()
    context.reset_ps_context()


# ---- the table ----


def test_no_key_stands_in_two_tables():
    assert sum(map(len, TABLES.values())) == len(set().union(*TABLES.values()))


@pytest.mark.parametrize(("setter", "key"), ROWS)
def test_every_row_is_documented_and_its_default_can_be_read_and_set(setter, key):
    assert f"`{key.name}`" in KEYS_PAGE
    default = GETTERS[setter](key.name)
    if key.name in READ_ONLY:
        with pytest.raises(ContextError, match="pipeline_config"):
            setter(**{key.name: default})
    elif default is not None or key.name == "device_target":
        setter(**{key.name: default})
        assert GETTERS[setter](key.name) == default
        assert current().is_set(key.name)


@pytest.mark.parametrize(("setter", "key"), ROWS)
def test_a_row_that_is_not_active_changes_nothing_the_library_reads(setter, key):
    if key.active or key.name in READ_ONLY or key.honours is None:
        return
    for value in key.honours:
        if value is not None:
            setter(**{key.name: key.read(value)})
            assert GETTERS[setter](key.name) == key.read(value)
            assert current().defaults == dataclasses.replace(
                ParallelContext().defaults, training=current().defaults.training
            )


def test_what_get_gives_cannot_change_the_defaults():
    get_auto_parallel_context("comm_fusion")["allreduce"]["mode"] = "index"
    assert get_auto_parallel_context("comm_fusion")["allreduce"]["mode"] == "auto"


# ---- what is accepted ----

ACCEPTED = [
    (set_auto_parallel_context, {"device_num": 1}, None),
    (set_auto_parallel_context, {"device_num": 100_000}, None),
    (set_auto_parallel_context, {"global_rank": 4095}, None),
    *[(set_auto_parallel_context, {"parallel_mode": mode}, None) for mode in ParallelMode.MODE_LIST],
    *[(set_auto_parallel_context, {"search_mode": mode}, None) for mode in search.MODES],
    (set_auto_parallel_context, {"auto_parallel_search_mode": "recursive_programming"}, None),
    (set_auto_parallel_context, {"out_strategy_mode": "honour"}, None),
    (set_auto_parallel_context, {"dataset_strategy": ((8, 1), (), (2, 4))}, None),
    (set_auto_parallel_context, {"enable_alltoall": True}, None),
    (set_auto_parallel_context, {"optimizer_weight_shard_size": 1}, None),
    (set_auto_parallel_context, {"pipeline_stages": 1, "enable_parallel_optimizer": False}, None),
    (set_auto_parallel_context, {"pipeline_stages": 4, "auto_pipeline": True}, None),
    (
        set_auto_parallel_context,
        {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}},
        None,
    ),
    (set_context, {"mode": context_keys.GRAPH_MODE}, None),
    (set_context, {"device_target": "gpu"}, "GPU"),
    (set_context, {"device_target": "Tpu"}, "TPU"),
    (set_context, {"device_target": "ASCEND"}, "Ascend"),
    (set_context, {"save_graphs": True}, 2),
    (set_context, {"save_graphs": False}, 0),
    (set_context, {"save_graphs": 3}, None),
    (set_context, {"save_graphs_path": "graphs"}, None),
    (set_algo_parameters, {"tensor_slice_align_size": 16, "fully_use_devices": False}, None),
    (set_algo_parameters, {"fully_use_devices": True, "elementwise_op_strategy_follow": True}, None),
    (set_algo_parameters, {"enable_algo_approxi": True, "algo_approxi_epsilon": 1}, None),
    (set_algo_parameters, {"tensor_slice_align_enable": True, "tensor_slice_align_size": 1024}, None),
]


@pytest.mark.parametrize(
    ("setter", "settings", "read"), ACCEPTED, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_accepted_and_read_back(setter, settings, read):
    setter(**settings)
    for key, value in settings.items():
        assert GETTERS[setter](key) == (value if read is None else read)
        assert current().is_set(key)
    hash(current())


@pytest.mark.parametrize(
    "settings",
    [
        {"comm_fusion": {"openstate": True}},
        {"comm_fusion": {"allreduce": {"mode": "auto", "config": None}}},
        {"parallel_optimizer_config": {"parallel_optimizer_threshold": 64}},
        {"pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}},
        {"strategy_ckpt_config": {}},
    ],
    ids=str,
)
def test_a_part_that_equals_the_default_asks_for_nothing(settings):
    set_auto_parallel_context(**settings)
    for key in settings:
        row = context_keys.AUTO_PARALLEL_KEYS[key]
        assert get_auto_parallel_context(key) == row.read(row.default)


def test_dataset_strategy_of_layouts():
    layout = Layout((4, 2), ("dp", "mp"))
    strategy = (layout("dp", "None"), layout("dp"), (8,))
    set_auto_parallel_context(dataset_strategy=strategy)
    assert current().dataset_strategy == strategy
    hash(current())


def test_device_num_unset():
    assert current().device_num is None
    assert get_auto_parallel_context("device_num") == 1


def test_global_rank_is_held_against_the_devices_in_use():
    set_auto_parallel_context(global_rank=7)
    current().defaults.check_rank(8)
    with pytest.raises(ContextError, match="from 0 to 3"):
        current().defaults.check_rank(4)


# ---- two names of one setting ----


def test_search_mode_has_an_old_name():
    set_auto_parallel_context(auto_parallel_search_mode="sharding_propagation")
    assert current().search_mode == get_auto_parallel_context("auto_parallel_search_mode") == "sharding_propagation"
    assert current().is_set("search_mode") and current().is_set("auto_parallel_search_mode")
    set_auto_parallel_context(auto_parallel_search_mode="auto", search_mode="auto")


@pytest.mark.parametrize(
    ("settings", "strategy", "full"),
    [
        ({"full_batch": True}, "full_batch", True),
        ({"full_batch": False}, "data_parallel", False),
        ({"dataset_strategy": "full_batch"}, "full_batch", True),
        ({"dataset_strategy": "full_batch", "full_batch": True}, "full_batch", True),
        ({"dataset_strategy": ((8, 1),)}, ((8, 1),), False),
        ({"dataset_strategy": ((8, 1),), "full_batch": False}, ((8, 1),), False),
        ({"full_batch": False, "dataset_strategy": ((8, 1),)}, ((8, 1),), False),
    ],
)
def test_full_batch_and_dataset_strategy_are_one(settings, strategy, full):
    set_auto_parallel_context(**settings)
    assert current().dataset_strategy == strategy
    assert get_auto_parallel_context("full_batch") is full
    assert current().is_set("full_batch") and current().is_set("dataset_strategy")


def test_full_batch_after_a_tuple():
    set_auto_parallel_context(dataset_strategy=((8, 1),))
    set_auto_parallel_context(full_batch=False)
    assert current().dataset_strategy == ((8, 1),)
    set_auto_parallel_context(full_batch=True)
    set_auto_parallel_context(full_batch=False)
    assert current().dataset_strategy == "data_parallel"


# ---- what is refused ----

_OPT = "parallel_optimizer_config"
_FUSE = "comm_fusion"
REFUSED = {
    ContextError: [
        (set_auto_parallel_context, {"device_num": -1}),
        (set_auto_parallel_context, {"global_rank": 4096}),
        (set_auto_parallel_context, {"parallel_mode": "semi_auto"}),
        (set_auto_parallel_context, {"auto_parallel_search_mode": "recursive"}),
        (set_auto_parallel_context, {"search_mode": "propagation"}),
        (set_auto_parallel_context, {"search_mode": "auto", "auto_parallel_search_mode": "sharding_propagation"}),
        (set_auto_parallel_context, {"out_strategy_mode": "honor"}),
        (set_auto_parallel_context, {"full_batch": True, "dataset_strategy": ((8, 1),)}),
        (set_auto_parallel_context, {"dataset_strategy": "fullbatch"}),
        (set_auto_parallel_context, {"dataset_strategy": ((8, 0), [1], (True, 2.0))}),
        (set_auto_parallel_context, {"dataset_strategy": (Layout((4, 2), ("dp", "interleaved_parallel")),)}),
        (set_auto_parallel_context, {"devicenum": 8, "foo": 1}),
        (set_auto_parallel_context, {"device_target": "CPU"}),
        (set_auto_parallel_context, {"pipeline_stages": 0}),
        (set_auto_parallel_context, {"pipeline_config": {"foo": 1}}),
        (set_auto_parallel_context, {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "1f2b"}}),
        (set_auto_parallel_context, {"pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "gpipe"}}),
        (set_auto_parallel_context, {"pipeline_scheduler": "gpipe"}),
        (set_auto_parallel_context, {"grad_accumulation_step": 4}),
        (set_auto_parallel_context, {"optimizer_weight_shard_size": 0}),
        (set_auto_parallel_context, {_OPT: {"optimizer_level": "level4", "parallel_optimizer_threshold": -1}}),
        (set_auto_parallel_context, {_OPT: {"optimizer_level": "level3", "gradient_accumulation_shard": True}}),
        (set_auto_parallel_context, {_FUSE: {"alltoall": {"mode": "auto", "config": None}}}),
        (set_auto_parallel_context, {_FUSE: {"openstate": 1, "allreduce": "auto", "allgather": {"mode": "size"}}}),
        (set_auto_parallel_context, {_FUSE: {"allgather": {"mode": "index", "config": [1]}}}),
        (set_auto_parallel_context, {_FUSE: {"allreduce": {"mode": "size", "config": -1}}}),
        (set_auto_parallel_context, {_FUSE: {"allreduce": {"mode": "auto", "config": 32}}}),
        (set_auto_parallel_context, {"all_reduce_fusion_config": [35, 20]}),
        (set_auto_parallel_context, {"all_reduce_fusion_config": []}),
        (set_auto_parallel_context, {"all_reduce_fusion_config": [True, 1.0, -3]}),
        (set_auto_parallel_context, {"device_num": 0, "global_rank": "0", "force_fp32_communication": True}),
        (get_auto_parallel_context, "parallel_modes"),
        (get_auto_parallel_context, "mode"),
        (set_context, {"mode": 2}),
        (set_context, {"device_target": "NPU"}),
        (set_context, {"save_graphs": 4}),
        (set_context, {"parallel_mode": "auto_parallel"}),
        (get_context, "device"),
        (set_algo_parameters, {"algo_approxi_epsilon": 0}),
        (set_algo_parameters, {"tensor_slice_align_size": 2000}),
        (set_algo_parameters, {"tensor_slice_align_size": 0, "tensor_slice_align_enable": 1}),
        (set_algo_parameters, {"fully_use_device": True}),
        (get_algo_parameters, "epsilon"),
    ],
    ContextTypeError: [
        (set_auto_parallel_context, {"device_num": True}),
        (set_auto_parallel_context, {"device_num": "8"}),
        (set_auto_parallel_context, {"device_num": None}),
        (set_auto_parallel_context, {"parallel_mode": None}),
        (set_auto_parallel_context, {"search_mode": 1}),
        (set_auto_parallel_context, {"full_batch": 1}),
        (set_auto_parallel_context, {"dataset_strategy": [(8, 1)]}),
        (set_auto_parallel_context, {"dataset_strategy": (8, 1)}),
        (set_auto_parallel_context, {"pipeline_stages": "2"}),
        (set_auto_parallel_context, {"gradients_mean": 1}),
        (set_auto_parallel_context, {"strategy_ckpt_config": {"load_file": 1, "only_trainable_params": 1}}),
        (set_auto_parallel_context, {_OPT: {"optimizer_level": 2}}),
        (get_auto_parallel_context, 3),
        (set_context, {"mode": "GRAPH_MODE"}),
        (set_context, {"device_target": 0}),
        (set_context, {"save_graphs_path": None}),
        (set_algo_parameters, {"algo_approxi_epsilon": "0.1"}),
        (set_algo_parameters, {"fully_use_devices": "True"}),
    ],
    NotAvailableError: [
        (
            set_auto_parallel_context,
            {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"}},
        ),
        (set_auto_parallel_context, {"sharding_propagation": True}),
        (set_auto_parallel_context, {"communi_parallel_mode": "no_group_parallel"}),
        (set_auto_parallel_context, {"group_ckpt_save_file": "group.ckpt"}),
        (set_context, {"device_id": 1}),
    ],
}


SHOWN = [
    (set_auto_parallel_context, {"parallel_mode": "semi_auto"}),
    (set_auto_parallel_context, {"full_batch": True, "dataset_strategy": ((8, 1),)}),
    (set_auto_parallel_context, {"device_num": 0, "global_rank": "0", "force_fp32_communication": True}),
]
"""The calls whose full text a reviewer reads in golden/messages_context.txt."""


def refused(function, arguments):
    """The error of a call; the context is as it was."""
    before = current()
    error = refusal(lambda: function(**arguments) if isinstance(arguments, dict) else function(arguments))
    assert current() == before
    return error


def test_message_of_a_bad_setting_reads_as_the_golden_file(golden):
    errors = [refused(*row) for row in SHOWN]
    golden("messages_context", "\n\n".join(f"{type(error).__name__}: {error}" for error in errors))


@pytest.mark.parametrize(
    ("kind", "function", "arguments"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_bad_setting_is_refused_with_type_and_place(kind, function, arguments):
    error = refused(function, arguments)
    assert type(error) is kind
    keys = arguments if isinstance(arguments, dict) else [repr(arguments)]
    assert all(
        p.where.startswith(f"{function.__name__}(") and any(key in p.where for key in keys) for p in error.problems
    )


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"device_num": "8", "full_batch": 1}, ContextTypeError),
        ({"device_num": "8", "global_rank": -1}, ContextError),
        ({"device_num": "8", "pipeline_result_broadcast": True}, ContextTypeError),
        ({"foo": 1, "pipeline_result_broadcast": True}, ContextError),
        ({"force_fp32_communication": True, "pipeline_result_broadcast": True}, NotAvailableError),
    ],
)
def test_all_problems_at_once_and_nothing_changes(settings, kind):
    set_auto_parallel_context(device_num=4)
    before = current()
    with pytest.raises(kind) as caught:
        set_auto_parallel_context(parallel_mode="auto_parallel", **settings)
    assert type(caught.value) is kind
    assert len(caught.value.problems) == 2
    assert current() is before


def test_the_dataclass_is_validated_and_normalised():
    made = ParallelContext(device_target="cpu", save_graphs=True)
    assert (made.device_target, made.save_graphs) == ("CPU", 2)
    with pytest.raises(ContextError) as caught:
        ParallelContext(device_num=0, global_rank=-1)
    assert len(caught.value.problems) == 2
    with pytest.raises(ContextError, match="recursive_programming"):
        ParallelContext(search_mode="recursive")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.device_num = 2


# ---- reset, blocks, threads ----


def test_reset_forgets_that_a_key_was_set():
    set_auto_parallel_context(parallel_mode="stand_alone", enable_alltoall=True, dataset_strategy="full_batch")
    set_context(device_target="cpu")
    assert current().is_set("parallel_mode")
    context.reset_auto_parallel_context()
    assert current() == ParallelContext(device_target="CPU")
    context.reset_context()
    assert current() == ParallelContext()


def test_is_set_of_an_unknown_key():
    with pytest.raises(ContextError, match="parallel_mode"):
        current().is_set("parallel_mod")


def test_a_block_restores_what_was_there():
    set_auto_parallel_context(device_num=8)
    with auto_parallel(parallel_mode="auto_parallel") as outer:
        assert outer == current() and outer.device_num == 8
        set_auto_parallel_context(device_num=2)
        set_context(mode=context_keys.GRAPH_MODE)
        with auto_parallel(device_num=4):
            context.reset_auto_parallel_context()
            assert current().device_num is None and current().mode == context_keys.GRAPH_MODE
        assert current().device_num == 2
    assert current() == ParallelContext(device_num=8)


def test_a_block_restores_after_an_error():
    with pytest.raises(RuntimeError), auto_parallel(device_num=4):
        raise RuntimeError
    with pytest.raises(ContextError, match=r"auto_parallel\(device_num=0\)"), auto_parallel(device_num=0):
        pass
    assert not current().is_set("device_num")


def test_a_block_decorates_a_function():
    @auto_parallel(device_num=4)
    def inside():
        return current().device_num

    assert inside() == inside() == 4
    assert current().device_num is None


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_see_what_is_set_and_set_for_all():
    set_auto_parallel_context(device_num=8)
    assert in_thread(lambda: current().device_num) == 8
    in_thread(lambda: set_auto_parallel_context(device_num=4))
    assert current().device_num == 4


def test_a_bare_context_sees_what_another_set():
    contextvars.Context().run(lambda: set_auto_parallel_context(device_num=8))  # as two cells of a notebook may run
    assert contextvars.Context().run(lambda: current().device_num) == 8


def test_a_block_stays_in_its_thread():
    with auto_parallel(device_num=4):
        assert contextvars.Context().run(lambda: current().device_num) is None
        copied = contextvars.copy_context()
        assert in_thread(lambda: copied.run(lambda: current().device_num)) == 4


def test_tasks_inherit_a_block_and_keep_their_own():
    async def task(count):
        with auto_parallel(device_num=count):
            await asyncio.sleep(0)
            return current().device_num, current().parallel_mode

    async def both():
        with auto_parallel(parallel_mode="auto_parallel"):
            return await asyncio.gather(task(2), task(4))

    assert asyncio.run(both()) == [(2, "auto_parallel"), (4, "auto_parallel")]


def test_no_update_is_lost_between_threads():
    keys = [{"device_num": 8}, {"global_rank": 3}, {"full_batch": True}, {"parallel_mode": "auto_parallel"}]
    threads = [threading.Thread(target=lambda k=k: [set_auto_parallel_context(**k) for _ in range(50)]) for k in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert current().explicit == {"device_num", "global_rank", "dataset_strategy", "parallel_mode"}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5000), st.floats(), st.sampled_from([*ParallelMode.MODE_LIST, "auto", ""])
)
ANYTHING = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.sampled_from(["mode", "config", "allreduce"])), inner, max_size=3),
    ),
    max_leaves=6,
)


@hypothesis.given(st.data())
def test_any_value_is_kept_or_refused_with_a_fix(data):
    setter = data.draw(st.sampled_from(list(TABLES)))
    settings = data.draw(st.dictionaries(st.sampled_from(sorted(TABLES[setter])), ANYTHING, max_size=4))
    with auto_parallel():
        before = current()
        try:
            setter(**settings)
        except ShardError as error:
            assert current() is before
            assert all(problem.fix and problem.where for problem in error.problems)
        else:
            assert all(current().is_set(key) for key in settings)
            hash(current())
            context.reset_auto_parallel_context()
            context.reset_context()
            context.reset_algo_parameters()
            context.reset_ps_context()
            assert current() == before
