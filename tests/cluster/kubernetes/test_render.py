"""Manifests: the published schemas take them, and the processes read from them what their launcher would say."""

import copy
import functools
import operator

import pytest

from shardfn.cluster.environment import Membership, membership
from shardfn.cluster.kubernetes import Job, read_job, render
from shardfn.cluster.kubernetes.job import MAX_NAME, job_of
from shardfn.cluster.kubernetes.targets import MAX_PROCESSES, node_labels
from shardfn.errors import ClusterError
from tests.cluster.kubernetes.jobs import CASES, COMMAND, JOBS
from tests.cluster.kubernetes.schemas import faults
from tests.messages import refusal

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def at(value, path):
    """`at(manifest, "spec/replicatedJobs/0")`."""
    keys = (int(key) if key.isdigit() else key for key in path.split("/"))
    return functools.reduce(operator.getitem, keys, value)


def jobset(job):
    return next(m for m in render(job, "jobset") if m["kind"] == "JobSet")


def pod(made):
    return at(made, "spec/replicatedJobs/0/template/spec/template/spec")


def variables(container, index):
    """The variables of a process, as Kubernetes fills them in."""
    return {e["name"]: e.get("value", str(index) if e.get("valueFrom") == {"fieldRef": {"fieldPath": INDEX}} else None)
            for e in container["env"]}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_published_schemas_take_every_manifest(name, kind):
    made = render(JOBS[name], kind)
    assert [fault for manifest in made for fault in faults(manifest)] == []
    names = [m["kind"] for m in made]
    full = ["PersistentVolumeClaim", "ConfigMap"] if JOBS[name].storage else []
    last = {
        "trainjob": ["TrainingRuntime", "TrainJob"],
        "jobset": ["JobSet"],
        "rayjob": ["RayJob"],
        "raycluster": ["RayCluster"],
    }
    assert names == [*full, *last[kind]]


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("cpu", "jobset", "spec"),
        ("cpu", "jobset", "spec/failurePolicy"),
        ("cpu", "jobset", "spec/replicatedJobs/0"),
        ("cpu", "jobset", "spec/replicatedJobs/0/template/spec"),
        ("cpu", "jobset", "spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/2/valueFrom/fieldRef"),
        ("cpu", "trainjob", "spec/trainer"),
        ("servers", "rayjob", "spec/rayClusterSpec/workerGroupSpecs/0"),
        ("servers", "rayjob", "spec/rayClusterSpec/headGroupSpec/template/spec/containers/0/resources"),
    ],
)
def test_schemas_refuse_unknown_fields_and_wrong_types(name, kind, path):
    bad = copy.deepcopy(render(JOBS[name], kind)[-1])
    at(bad, path)["tpyo"] = 1
    assert [f.split(": ")[0] for f in faults(bad)] == [path] and "'tpyo' was unexpected" in faults(bad)[0]
    bad = copy.deepcopy(render(JOBS[name], kind)[-1])
    key = next(iter(at(bad, path)))
    at(bad, path)[key] = object()
    assert faults(bad)


@pytest.mark.parametrize("name", ["cpu", "gpu", "tpu"])
def test_processes_of_a_jobset_know_their_group(name):
    job, made = JOBS[name], jobset(JOBS[name])
    size = at(made, "spec/replicatedJobs/0/template/spec")
    assert (size["completionMode"], size["parallelism"], size["completions"]) == (
        "Indexed",
        job.processes,
        job.processes,
    )
    for index in range(job.processes):
        found = membership({k: v for k, v in variables(pod(made)["containers"][0], index).items() if v is not None})
        assert found == Membership("gpt-workers-0-0.gpt:8476", job.processes, index)
    # The headless service has the name of the JobSet, and the first pod this host name.
    replicated = at(made, "spec/replicatedJobs/0/name")
    assert f"{made['metadata']['name']}-{replicated}-0-0.{made['metadata']['name']}" == "gpt-workers-0-0.gpt"
    assert at(made, "spec/network") == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_kubeflow_sets_the_group_of_a_trainjob():
    runtime, train = render(JOBS["cpu"], "trainjob")
    assert at(runtime, "spec/mlPolicy") == {"numNodes": 2, "jax": {}}
    assert at(train, "spec/runtimeRef") == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "gpt",
    }
    replicated = at(runtime, "spec/template/spec/replicatedJobs/0")
    assert at(replicated, "template/metadata/labels") == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], pod({"spec": {"replicatedJobs": [replicated]}})["containers"][0]["name"]) == (
        "node",
        "node",
    )
    own = {e["name"]: e["value"] for e in at(train, "spec/trainer/env")}
    assert not own.keys() & {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    assert own["JAX_NUM_CPU_DEVICES"] == "4" and int(own["NPROC"]) >= 8


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_a_failed_process_restarts_all_from_the_last_checkpoint(kind):
    made = render(JOBS["gpu"], kind)
    spec = made[-1]["spec"] if kind == "jobset" else at(made[-2], "spec/template/spec")
    assert (spec["failurePolicy"]["maxRestarts"], spec["failurePolicy"]["restartStrategy"]) == (3, "BlockingRecreate")
    job = at(spec, "replicatedJobs/0/template/spec")
    assert (job["backoffLimit"], at(job, "template/spec/restartPolicy")) == (0, "Never")
    own = at(job, "template/spec/containers/0")
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in own["volumeMounts"]
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "gpt"}} in at(job, "template/spec/volumes")
    claim = made[0]
    assert (at(claim, "metadata/name"), at(claim, "spec/accessModes")) == ("gpt", ["ReadWriteMany"])
    assert {at(m, "metadata/namespace") for m in made} == {"training"}
    assert all(at(m, "metadata/labels").items() >= JOBS["gpu"].labels.items() for m in made)
    assert {m["mountPath"] for m in own["volumeMounts"]} == {"/checkpoints", "/etc/shardfn", "/dev/shm", "/data"}
    assert made[1]["data"] == {"step.toml": JOBS["gpu"].plan}


def test_devices_and_places():
    limits = {
        name: pod(jobset(JOBS[name]))["containers"][0].get("resources", {}).get("limits")
        for name in ("cpu", "gpu", "tpu")
    }
    assert limits == {
        "cpu": None,
        "gpu": {"memory": "64Gi", "nvidia.com/gpu": "8"},
        "tpu": {"memory": "64Gi", "google.com/tpu": "4"},
    }
    assert pod(jobset(JOBS["tpu"]))["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice", "cloud.google.com/gke-tpu-topology": "4x4", "zone": "a",
    }  # fmt: skip
    assert pod(jobset(JOBS["gpu"]))["nodeSelector"] == {"zone": "a"}
    assert "annotations" in jobset(JOBS["tpu"])["metadata"] and "annotations" not in jobset(JOBS["gpu"])["metadata"]
    shapes = [
        node_labels(d)["cloud.google.com/gke-tpu-topology"]
        for d in ("tpu-v5p:4", "tpu-v4:8", "tpu-v5p:8x4x4", "tpu-v6e:256")
    ]
    assert shapes == ["2x2x1", "2x2x2", "4x4x8", "16x16"]


def test_parameter_servers_are_places_of_ray():
    spec = at(render(JOBS["servers"])[-1], "spec")
    cluster = spec["rayClusterSpec"]
    workers, servers = cluster["workerGroupSpecs"]
    assert (workers["groupName"], workers["replicas"], servers["groupName"], servers["replicas"]) == (
        "workers",
        4,
        "servers",
        2,
    )
    assert servers["rayStartParams"] == {"resources": '"{\\"server\\": 1}"'} and workers["rayStartParams"] == {}
    assert at(workers, "template/spec/containers/0/resources/limits")["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in at(servers, "template/spec/containers/0/resources/limits")
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"} and cluster["authOptions"] == {
        "mode": "token"
    }
    assert (spec["backoffLimit"], spec["entrypoint"]) == (3, "python train.py --steps 100")
    slice_, _ = at(render(JOBS["servers-tpu"])[-1], "spec/rayClusterSpec/workerGroupSpecs")
    assert (slice_["replicas"], slice_["numOfHosts"]) == (1, 4)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("cpu", "rayjob", "a rayjob is for parameter servers, and there are none"),
        ("servers", "jobset", "a jobset has no parameter servers"),
        ("cpu", "jobsets", "there is no kind jobsets"),
    ],
)
def test_a_kind_that_does_not_fit(name, kind, says):
    assert refusal(render, JOBS[name], kind).problems[0].what == says


DESCRIPTION = {"name": "gpt", "image": "gpt:1", "script": "train.py"}


STORAGE = "`storage` is not an absolute path and the name of a claim, with or without size and storage_class"
ENV, LABELS = (
    "`env` is not a table of names with texts, or with valueFrom",
    "`labels` is not a table of texts that Kubernetes takes as labels",
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "GPT"}, "`name` is not lower case letters, digits and -, at most 40, a letter first"),
        ({"name": "a" * 41}, "`name` is not lower case letters, digits and -, at most 40, a letter first"),
        ({"processes": True}, "`processes` is not a number from 1 to 100,000"),
        ({"processes": 100_001}, "`processes` is not a number from 1 to 100,000"),
        ({"device": "h100:8000000", "devices": 8}, "h100:8000000 has 1,000,000 processes"),
        ({"servers": 100_001}, "`servers` is not a number from 0 to 100,000"),
        ({"nodes": "aws"}, "`nodes` is not one of gke, nvidia, any"),
        ({"state": "80 GB"}, "`state` is not a quantity, as text"),
        ({"grace_s": -1}, "`grace_s` is not a number of seconds"),
        ({"pod": {"securityContext": []}}, "`pod` is not a table of fields of PodSpec"),
        ({"retries": -1}, "`retries` is not a number from 0"),
        ({"memory": "64 GiB"}, "`memory` is not a quantity, as text"),
        ({"storage": {"path": "checkpoints", "claim": "a"}}, STORAGE),
        ({"storage": {"claim": "a"}}, STORAGE),
        ({"storage": {"path": "/checkpoints", "claim": "My Claim"}}, STORAGE),
        ({"env": {"A": 1}}, ENV),
        ({"env": {"A B": "1"}}, ENV),
        ({"labels": {"a b": "c"}}, LABELS),
        ({"labels": {"a/b": "c d"}}, LABELS),
        ({"namespace": "My"}, "`namespace` is not lower case letters, digits and -, at most 63"),
        ({"image": ""}, "`image` is not a container image"),
        ({"device": "tpu-v5e:4x4", "processes": 3}, "3 processes with 5 devices each are not the 16 of tpu-v5e:4x4"),
        ({"command": ["a"]}, "the job has a script and a command"),
        ({"pod": {"restartPolicy": "Always"}}, "`pod` has the field restartPolicy"),
        ({"container": {"env": []}}, "`container` has the field env"),
    ],
)  # fmt: skip
def test_wrong_descriptions(change, says):
    error = refusal(job_of, DESCRIPTION | change)
    assert isinstance(error, ClusterError) and error.problems[0].what == says


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_resources_of_the_container_add_to_those_of_the_job(kind):
    more = {"resources": {"limits": {"ephemeral-storage": "10Gi"}}}
    made = render(job_of(DESCRIPTION | {"device": "h100:16", "memory": "64Gi", "container": more}), kind)
    asked = {"memory": "64Gi", "nvidia.com/gpu": "8", "ephemeral-storage": "10Gi"}
    assert str(made).count(str({"requests": {"memory": "64Gi", "cpu": "8"}, "limits": asked})) == 1


def test_a_description_reads_its_plan(tmp_path):
    (tmp_path / "step.toml").write_text(
        'format = "shardfn-layout"\nversion = 2\ndevice = "tpu-v5e:4x8"\n[mesh]\na = 32\n'
    )
    (tmp_path / "job.toml").write_text('name = "gpt"\nimage = "gpt:1"\ncommand = ["a"]\nplan = "step.toml"\n')
    (tmp_path / "job.yaml").write_text('name: gpt\nimage: "gpt:1"\ncommand: [a]\nplan: step.toml\n')
    job = read_job(tmp_path / "job.toml")
    assert (job.device, job.processes, job.devices, job.plan_name) == ("tpu-v5e:4x8", 8, 4, "step.toml")
    assert job == read_job(tmp_path / "job.yaml")
    assert Job("gpt", "gpt:1", COMMAND).devices == 1


def test_names_of_pods_are_short_enough():
    """An operator names a pod by the job, its role, two numbers and five letters; Kubernetes allows 63 characters."""
    job = Job("a" * MAX_NAME, "gpt:1", COMMAND, processes=MAX_PROCESSES)
    replicated = at(jobset(job), "spec/replicatedJobs/0")
    assert replicated["replicas"] == 1
    assert len(f"{job.name}-{replicated['name']}-0-{job.processes - 1}-abcde") <= 63
