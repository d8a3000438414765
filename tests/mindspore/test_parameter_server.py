"""MindSpore's parameter server: what `set_param_ps` marks, and the servers that hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn.mindspore as ms
from shardfn.errors import ClusterError, ContextError, NotAvailableError, StrategyError

X = np.arange(8, dtype="float32").reshape(2, 4) / 8


class Dense(ms.Cell):
    def __init__(self, size):
        self.w = jnp.ones((4, size)) / size

    def construct(self, x):
        return x @ self.w


class Net(ms.Cell):
    def __init__(self):
        self.first, self.rest, self.scale = Dense(4), {"head": [Dense(2)]}, jnp.ones(2)

    def construct(self, x):
        return self.rest["head"][0](jnp.tanh(self.first(x))) * self.scale


@pytest.fixture
def on():
    with ms.auto_parallel():
        ms.set_ps_context(enable_ps=True, ms_role="MS_WORKER", server_num=2, worker_num=2)
        yield


@pytest.mark.parametrize(
    ("cell", "recurse", "found"),
    [
        (lambda net: net, True, {"first/w", "rest/head/0/w", "scale"}),
        (lambda net: net, False, {"scale"}),
        (lambda net: net.rest["head"][0], True, {"rest/head/0/w"}),
        (lambda net: net.first, False, {"first/w"}),
    ],
)
def test_set_param_ps_marks_the_arrays_of_a_cell(on, cell, recurse, found):
    net = Net()
    cell(net).set_param_ps(recurse=recurse)
    assert ms.ps_parameters(net).keys() == found
    assert ms.ps_parameters(net.with_parameters({"scale": jnp.zeros(2)})).keys() == found


def test_some_parameters_on_servers_and_the_others_in_the_step_train_as_all_in_one(on):
    net, optimizer = Net(), optax.adam(0.1)
    net.first.set_param_ps()
    server = ms.parameter_server(net, optimizer, timeout_s=0)
    params = net.parameters_dict()
    local = {path: array for path, array in params.items() if path not in ms.ps_parameters(net)}
    state, whole, whole_state = optimizer.init(local), params, optimizer.init(params)
    grad = jax.jit(jax.grad(lambda p, x: jnp.sum(net.with_parameters(p)(x) ** 2)))
    for step in range(3):
        remote = server.pull(["first/w"], version=step).values
        total = jax.tree.map(jnp.zeros_like, params)
        for worker in range(2):
            found = grad({**local, **remote}, X[worker : worker + 1])
            server.push({"first/w": found["first/w"]}, worker, step)
            total = jax.tree.map(jnp.add, total, found)
        changes, state = optimizer.update({path: total[path] for path in local}, state)  # summed: the all-reduce
        local = optax.apply_updates(local, changes)
        changes, whole_state = optimizer.update(grad(whole, X), whole_state)
        whole = optax.apply_updates(whole, changes)
    after = {**local, **server.pull(["first/w"], version=3).values}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, whole)


def test_the_environment_says_what_is_not_set(monkeypatch):
    for name, value in {"MS_ROLE": "MS_SERVER", "MS_SERVER_NUM": "3", "MS_SCHED_PORT": "8118"}.items():
        monkeypatch.setenv(name, value)
    assert [ms.get_ps_context(key) for key in ("ms_role", "server_num", "scheduler_port", "scheduler_ip", "worker_num")] == [
        "MS_PSERVER", 3, 8118, None, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: ms.set_ps_context(enabled=True), ContextError, "no key of set_ps_context"),
        (lambda: ms.get_ps_context("enabled"), ContextError, "no key of get_ps_context"),
        (lambda: ms.set_ps_context(ms_role="worker"), ContextError, "ms_role"),
        (lambda: ms.set_ps_context(enable_ssl=True), NotAvailableError, "RAY_USE_TLS"),
        (lambda: Net().set_param_ps(), RuntimeError, "parameter server is not on"),
    ],
)
def test_usual_mistakes(call, kind, match, monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    with pytest.raises(kind, match=match):
        call()


def test_what_is_marked_must_be_there(on):
    with pytest.raises(NotAvailableError):
        Net().set_param_ps(init_in_server=True)
    with pytest.raises(StrategyError, match=r"call cell\.set_param_ps"):
        ms.parameter_server(Net(), optax.sgd(1.0))
    ms.reset_ps_context()
    with pytest.raises(ClusterError):
        Net().set_param_ps()
