"""MindSpore's MSJob: its three kinds of job, and what its operator says is wrong."""

import copy

import pytest

from shardfn.cluster.environment import membership
from shardfn.cluster.kubernetes import render, translate
from tests.cluster.kubernetes.schemas import faults
from tests.messages import refusal

POD = {"spec": {
    "volumes": [{"name": "script", "hostPath": {"path": "/home/me/net"}}],
    "containers": [{
        "name": "mindspore", "image": "registry.example.com/net:1", "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-c", "python /home/me/net/train.py --epochs=1"],
        "ports": [{"name": "msjob-port", "containerPort": 2222}],
        "volumeMounts": [{"mountPath": "/home/me/net", "name": "script"}],
        "env": [{"name": "GLOG_v", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
    }],
}}  # fmt: skip


def msjob(replicas, **spec):
    made = {
        kind: {"replicas": n, "restartPolicy": "Never", "template": copy.deepcopy(POD)} for kind, n in replicas.items()
    }
    return {"apiVersion": "mindspore.gitee.com/v1", "kind": "MSJob", "metadata": {"name": "ms-net"},
            "spec": {"msReplicaSpecs": made, **spec}}  # fmt: skip


SINGLE = msjob({"Worker": 1})
SERVERS = msjob(
    {"Scheduler": 1, "PS": 2, "Worker": 1}, runPolicy={"cleanPodPolicy": "None"}, successPolicy="AllWorkers"
)
PARALLEL = msjob({"scheduler": 1, "worker": 4}, runPolicy={"backoffLimit": 2, "ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 600})  # fmt: skip


@pytest.mark.parametrize(
    ("document", "processes", "servers", "kinds"),
    [
        (SINGLE, 1, 0, ["TrainingRuntime", "TrainJob"]),
        (SERVERS, 1, 2, ["Service", "RayJob"]),
        (PARALLEL, 4, 0, ["TrainingRuntime", "TrainJob"]),
    ],
    ids=["single worker", "worker with parameter servers", "scheduler and workers"],
)
def test_three_kinds_of_job(document, processes, servers, kinds):
    assert faults(document) == []
    job, notes = translate(document)
    assert (job.name, job.processes, job.devices, job.device, job.servers) == ("ms-net", processes, 1, "gpu", servers)
    assert (job.command[-1], job.memory, job.retries) == ("python /home/me/net/train.py --epochs=1", "16Gi", 0)
    made = render(job)
    assert [m["kind"] for m in made] == kinds and not [fault for m in made for fault in faults(m)]
    assert ("the Scheduler gets no pod: process 0 does its work" in notes) == (document is PARALLEL)
    assert "the image registry.example.com/net:1 and its script have to be of JAX" in notes[0]
    if not servers:
        [jobset] = render(job, "jobset")
        assert faults(jobset) == []
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        own = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
        assert (own["MS_ROLE"], own["MS_WORKER_NUM"], own["GLOG_v"]) == ("MS_WORKER", str(processes), "1")
        assert "ports" not in pod["containers"][0] and pod["volumes"][-1]["hostPath"] == {"path": "/home/me/net"}


def test_policies():
    assert (translate(PARALLEL)[0].ttl_s, translate(PARALLEL)[0].deadline_s) == (60, 600)
    again = copy.deepcopy(PARALLEL)
    again["spec"]["msReplicaSpecs"]["worker"]["restartPolicy"] = "ExitCode"
    again["spec"]["enableDynamicWorker"] = True
    job, notes = translate(again)
    assert job.retries == 2
    assert notes[3:] == (
        "a failed worker restarts all of them, 2 times at most (runPolicy.backoffLimit), from the last checkpoint",
        "enableDynamicWorker has no effect: workers of one collective fail together, and start again together",
    )


def edited(edit):
    document = copy.deepcopy(SERVERS)
    edit(document["spec"]["msReplicaSpecs"])
    return document


def own(replicas):
    return replicas["Worker"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda r: r.clear(), "MSJobSpec is not valid"),
        (lambda r: r["PS"].pop("template"), "MSJobSpec is not valid: containers definition expected in PS"),
        (
            lambda r: r["PS"]["template"]["spec"].update(containers=[]),
            "MSJobSpec is not valid: containers definition expected in PS",
        ),
        (lambda r: own(r).pop("image"), "MSJobSpec is not valid: Image is undefined in the container of Worker"),
        (
            lambda r: own(r).update(name="net"),
            "MSJobSpec is not valid: There is no container named mindspore in Worker",
        ),
        (lambda r: r["Scheduler"].update(replicas=2), "MSJobSpec is not valid: 2 Scheduler found"),
        (lambda r: r.update(scheduler=r["Scheduler"]), "MSJobSpec is not valid: 2 Scheduler found"),
        (lambda r: r.update(Workers=r.pop("Worker")), "there is no replica type Workers"),
        (lambda r: r.pop("Worker"), "the MSJob has no Worker"),
        (lambda r: r["Worker"].update(replicas=0), "the number of replicas of Worker is 0"),
        (
            lambda r: own(r)["resources"].update(limits={"huawei.com/Ascend910": 1}),
            "a worker asks for huawei.com/Ascend910",
        ),
        (lambda r: own(r).pop("command"), "nothing says what the job runs"),
    ],
)
def test_what_its_operator_says_is_wrong(edit, says):
    assert refusal(translate, edited(edit), "msjob.yaml").problems[0].what == says


def test_requests_limits_and_variables_are_kept():
    given = {"requests": {"cpu": 1, "memory": "8Gi", "ephemeral-storage": "1Gi"},
             "limits": {"cpu": 4, "memory": "16Gi", "nvidia.com/gpu": 2, "hugepages-2Mi": "1Gi"}}  # fmt: skip

    def edit(replicas):
        own(replicas).update(
            resources=given, env=[{"name": "A", "value": None}, {"name": "B"}, {"name": "C", "value": "1"}]
        )

    job, _ = translate(edited(edit))
    assert (job.device, job.devices, job.cpu, job.memory, job.env) == (
        "gpu",
        2,
        "1",
        "16Gi",
        {"A": "", "B": "", "C": "1"},
    )
    made = render(job)[-1]
    assert faults(made) == []
    workers, servers = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = {**given["limits"], "nvidia.com/gpu": "2"}
    assert workers["template"]["spec"]["containers"][0]["resources"] == {
        "requests": given["requests"],
        "limits": limits,
    }
    assert "nvidia.com/gpu" not in servers["template"]["spec"]["containers"][0]["resources"]["limits"]
    job, _ = translate(edited(lambda replicas: own(replicas).update(resources={"requests": {"memory": "8Gi"}})))
    made = render(job)[-1]
    asked = made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    assert asked == {"requests": {"memory": "8Gi", "cpu": "1"}}, "a request is no limit"


def test_every_pod_of_parameter_servers_has_its_role():
    """The variables that MindSpore's operator sets; the driver on the head is the one worker that `ms.init` counts."""
    document = copy.deepcopy(SERVERS)
    document["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 4
    service, made = render(translate(document)[0])
    cluster = made["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    found = [
        {e["name"]: e.get("value", e.get("valueFrom")) for e in t["spec"]["containers"][0]["env"]} for t in templates
    ]
    roles = [{name: value for name, value in one.items() if name.startswith("MS_")} for one in found]
    common = {"MS_SCHED_PORT": "6378", "MS_WORKER_NUM": "4", "MS_SERVER_NUM": "2"}
    assert roles == [
        {"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": {"fieldRef": {"fieldPath": "status.podIP"}}, **common},
        {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "ms-net-head", **common},
        {"MS_ROLE": "MS_PSERVER", "MS_SCHED_HOST": "ms-net-head", **common},
    ]
    assert (faults(service), service["metadata"]["name"]) == ([], "ms-net-head")
    assert (
        service["spec"]["selector"].items()
        <= {**templates[0]["metadata"]["labels"], "ray.io/node-type": "head"}.items()
    )
    ports = {port["name"]: port["containerPort"] for port in templates[0]["spec"]["containers"][0]["ports"]}
    assert int(common["MS_SCHED_PORT"]) + 1 == ports["gcs"] == service["spec"]["ports"][0]["port"], (
        "ms.init looks there"
    )
    env, *values = made["spec"]["entrypoint"].split()[:3]
    assert env == "env"
    driver = {**roles[0], "MS_SCHED_HOST": "10.0.0.1", **dict(value.split("=") for value in values)}
    assert (driver["MS_ROLE"], membership(driver).count) == ("MS_WORKER", 1)
