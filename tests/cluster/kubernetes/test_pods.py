"""Every pod of every manifest: what it may do, how long it may take to end, what it asks for, where it is placed."""

import dataclasses

import pytest

from shardfn.cluster.kubernetes import Job, notes, render, translate
from shardfn.cluster.kubernetes.job import job_of
from shardfn.cluster.kubernetes.targets import GPU_PRODUCTS
from shardfn.cost.devices.chips import CHIPS
from tests.cluster.kubernetes.jobs import CASES, COMMAND, JOBS
from tests.cluster.kubernetes.schemas import faults
from tests.cluster.kubernetes.test_msjob import SERVERS

DESCRIPTION = {"name": "gpt", "image": "gpt:1", "script": "train.py", "device": "h100:16"}
SUBMITTER = "ray-job-submitter"


def pods(node):
    """Every specification of a pod within manifests."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        else:
            yield from (pod for value in node.values() for pod in pods(value))
    elif isinstance(node, list):
        yield from (pod for value in node for pod in pods(value))


def pods_of(description, kind="jobset"):
    return list(pods(render(job_of(DESCRIPTION | description), kind)))


def unrestricted(pod):
    """What the profile "restricted" of the Pod Security Standards refuses, of the fields that manifests have."""
    context = pod.get("securityContext", {})
    if pod.get("hostNetwork") or pod.get("hostPID") or pod.get("hostIPC"):
        yield "host namespaces"
    for own in [*pod["containers"], *pod.get("initContainers", ())]:
        mine = own.get("securityContext", {})
        if mine.get("runAsNonRoot", context.get("runAsNonRoot")) is not True:
            yield "runAsNonRoot"
        if mine.get("runAsUser", context.get("runAsUser")) == 0:
            yield "runAsUser"
        if mine.get("seccompProfile", context.get("seccompProfile", {})).get("type") not in (
            "RuntimeDefault",
            "Localhost",
        ):
            yield "seccompProfile"
        if mine.get("allowPrivilegeEscalation") is not False or mine.get("privileged"):
            yield "allowPrivilegeEscalation"
        capabilities = mine.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "capabilities"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_pod_is_restricted_without_a_token_and_asks_for_something(name, kind):
    found = list(pods(render(JOBS[name], kind)))
    assert len(found) == {"trainjob": 1, "jobset": 1, "raycluster": 3, "rayjob": 4}[kind]
    for pod in found:
        assert list(unrestricted(pod)) == []
        assert pod["automountServiceAccountToken"] is False
        assert isinstance(pod["terminationGracePeriodSeconds"], int)
    asked = [pod["containers"][0].get("resources") for pod in found]
    if kind == "trainjob":
        asked = [render(JOBS[name], kind)[-1]["spec"]["trainer"]["resourcesPerNode"]]
    assert all({"cpu", "memory"} <= one["requests"].keys() for one in asked)


def test_pods_of_an_msjob_are_restricted_too():
    found = list(pods(render(translate(SERVERS)[0])))
    assert len(found) == 4 and [fault for pod in found for fault in unrestricted(pod)] == []


@pytest.mark.parametrize(
    ("description", "refused"),
    [
        ({}, set()),
        ({"pod": {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}}, set()),
        ({"pod": {"securityContext": {"runAsNonRoot": False}}}, {"runAsNonRoot"}),
        ({"pod": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}}, {"seccompProfile"}),
        ({"container": {"securityContext": {"allowPrivilegeEscalation": True}}}, {"allowPrivilegeEscalation"}),
        ({"container": {"securityContext": {"capabilities": {"add": ["SYS_RESOURCE"]}}}}, {"capabilities"}),
        ({"pod": {"containers": [{"name": "a", "image": "a", "securityContext": {"privileged": True}}]}},
         {"allowPrivilegeEscalation"}),
        ({"pod": {"initContainers": [{"name": "a", "image": "a"}]}}, set()),
    ],
)  # fmt: skip
def test_an_image_loosens_what_it_names_and_nothing_else(description, refused):
    [pod] = pods_of(description)
    assert set(unrestricted(pod)) == refused
    given = description.get("pod", {}).get("securityContext", {})
    assert pod["securityContext"].items() >= given.items()


def test_a_job_that_asks_the_api_server_gets_a_token():
    [pod] = pods_of({"pod": {"automountServiceAccountToken": True, "serviceAccountName": "trainer"}})
    assert (pod["automountServiceAccountToken"], pod["serviceAccountName"]) == (True, "trainer")


PLAN = "# Estimated per call and device: 7 µs, 96 B sent, peak memory {peak:,} B.\n# The arguments have {all:,} B in all.\n"


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 30),
        ({"state": "100Gi"}, 30 + 2 * 1024),
        ({"plan": PLAN.format(peak=1 << 30, all=50 << 30)}, 30 + 1024),
        ({"plan": PLAN.format(peak=1 << 30, all=50 << 30), "state": "1Mi"}, 31),
        ({"plan": "[mesh]\na = 16\n"}, 30),
        ({"state": "100Gi", "grace_s": 45}, 45),
        ({"state": "100Gi", "pod": {"terminationGracePeriodSeconds": 7}}, 7),
    ],
)
def test_a_pod_has_the_time_to_save_the_state(fields, seconds):
    made = render(dataclasses.replace(JOBS["servers"], **{"plan": "", "pod": {}} | fields))
    assert [
        pod["terminationGracePeriodSeconds"] for pod in pods(made) if pod["containers"][0]["name"] != SUBMITTER
    ] == [seconds] * 3


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({"processes": 2, "devices": 8, "device": "h100:16"}, {"cpu": "8", "memory": "4Gi"}),
        ({"processes": 2, "devices": 8, "device": "h100:16", "state": "64Gi"}, {"cpu": "8", "memory": "36Gi"}),
        ({"devices": 4}, {"cpu": "4", "memory": "8Gi"}),
        ({"devices": 4, "plan": PLAN.format(peak=3 << 30, all=1 << 30)}, {"cpu": "4", "memory": "17Gi"}),
        ({"devices": 4, "cpu": "2", "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"}),
        ({"container": {"resources": {"limits": {"cpu": "6"}}}}, {"memory": "5Gi"}),
        ({"container": {"resources": {"requests": {"cpu": "6"}}}}, {"memory": "5Gi", "cpu": "6"}),
    ],
)
def test_a_process_requests_what_it_is_not_told(fields, requests):
    [pod] = pods(render(Job("gpt", "gpt:1", COMMAND, **fields), "jobset"))
    assert pod["containers"][0]["resources"]["requests"] == requests


def terms(pod):
    """The node labels of a pod's required affinity: what one of its terms takes."""
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return {row["key"]: row["values"] for term in required for row in term["matchExpressions"]}


GKE, PRODUCT = "cloud.google.com/gke-accelerator", "nvidia.com/gpu.product"


def test_the_gpus_of_a_target_choose_the_nodes():
    both = {GKE: ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"], PRODUCT: ["NVIDIA-H100-80GB-HBM3"]}
    assert terms(pods_of({})[0]) == both
    assert terms(pods_of({"nodes": "gke"})[0]) == {GKE: both[GKE]}
    assert terms(pods_of({"nodes": "nvidia"})[0]) == {PRODUCT: both[PRODUCT]}
    own = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert pods_of({"pod": {"affinity": own}})[0]["affinity"] == own
    apart = {"podAntiAffinity": {}}
    assert pods_of({"pod": {"affinity": apart}})[0]["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
    for nowhere in ({"nodes": "any"}, {"device": "gpu"}, {"device": "cpu:8"}):
        assert not pods_of(nowhere)[0].keys() & {"affinity", "nodeSelector"}
    assert "nodeSelector" not in pods_of({"device": "tpu-v5e:4x4", "nodes": "any"})[0]
    head, workers, servers = (
        pod.get("affinity") for pod in pods(render(dataclasses.replace(JOBS["servers"], device="a100:4"), "raycluster"))
    )
    assert head is None and servers is None and "nvidia-a100-80gb" in str(workers)


def test_labels_of_gpus_are_device_names():
    assert {chip.name for chip in CHIPS.values() if chip.platform == "gpu"} == GPU_PRODUCTS.keys()
    for chip, product in GPU_PRODUCTS.items():
        longest = max((len(kind), known.name) for known in CHIPS.values() for kind in known.device_kinds
                       if product.replace("-", " ").startswith(kind.replace("-", " ")))  # fmt: skip
        assert longest[1] == chip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_network_policy_encloses_the_pods_of_a_job(name, kind):
    job = JOBS[name]
    assert "NetworkPolicy" not in [made["kind"] for made in render(job, kind)], "off by default"
    made = render(job, kind, network_policy=True)
    [policy] = [one for one in made if one["kind"] == "NetworkPolicy"]
    assert faults(policy) == [] and policy["metadata"]["name"] == job.name
    spec = policy["spec"]
    selected = spec["podSelector"]["matchLabels"]
    if kind in ("rayjob", "raycluster"):
        templates = [pod for pod in labelled(made)]
        assert templates and all(labels.items() >= selected.items() for labels in templates)
        operator = spec["ingress"].pop()
        assert operator["ports"] == [{"protocol": "TCP", "port": 8265}], "the dashboard alone"
    else:
        assert selected == {"jobset.sigs.k8s.io/jobset-name": job.name}
    assert (spec["policyTypes"], spec["ingress"]) == (
        ["Ingress"],
        [{"from": [{"podSelector": {"matchLabels": selected}}]}],
    )


def labelled(node):
    """The labels of every pod template within manifests."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node["metadata"]["labels"]
        yield from (labels for value in node.values() for labels in labelled(value))
    elif isinstance(node, list):
        yield from (labels for value in node for labels in labelled(value))


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ({}, []),
        ({"servers": 2}, ["the parameter servers have no storage"]),
        ({"storage": {"path": "/a", "claim": "a"}}, ["nothing says how large the state is"]),
        ({"storage": {"path": "/a", "claim": "a"}, "grace_s": 60}, []),
        ({"storage": {"path": "/a", "claim": "a", "size": "1Ti"}, "state": "1Gi"}, ["the claim of [storage] is ReadWriteMany"]),
        ({"storage": {"path": "/a", "claim": "a", "size": "1Ti", "storage_class": "nfs"}, "servers": 2, "state": "1Gi"}, []),
    ],
)  # fmt: skip
def test_notes_say_what_would_surprise(description, says):
    found = notes(job_of(DESCRIPTION | description))
    assert len(found) == len(says) and all(map(str.startswith, found, says))
