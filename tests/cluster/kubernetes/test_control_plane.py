"""The API server of custom resources stores every manifest as it is written. `crds/README.md` says how to have one."""

import contextlib
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from shardfn.cluster.kubernetes import render
from tests.cluster.kubernetes.jobs import CASES, JOBS
from tests.cluster.kubernetes.schemas import FILES, schema
from tests.cluster.kubernetes.test_msjob import PARALLEL

SERVER, ETCD = os.environ.get("SHARDFN_APISERVER"), os.environ.get("SHARDFN_ETCD", "/usr/bin/etcd")
PORTS = (16443, 12379, 12380)
GROUPS = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2"), "TrainJob": ("trainer.kubeflow.org", "v1alpha1"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1"), "RayJob": ("ray.io", "v1"), "RayCluster": ("ray.io", "v1"),
    "MSJob": ("mindspore.gitee.com", "v1"),
}  # fmt: skip
KEPT = {"type", "required", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
        "pattern", "x-kubernetes-validations"}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SERVER, reason="SHARDFN_APISERVER names no API server")]


def structural(node, file):
    """A pinned schema as a definition holds it: references written out, unknown fields refused by the server itself."""
    if "$ref" in node:
        other, _, name = node["$ref"].partition("#/$defs/")
        return structural(schema(other or file)["$defs"][name], other or file)
    if {"anyOf", "oneOf"} & node.keys():
        return {"x-kubernetes-int-or-string": True}
    made = {key: value for key, value in node.items() if key in KEPT}
    if "properties" in node:
        made["properties"] = {name: structural(p, file) for name, p in node["properties"].items()}
    if "items" in node:
        made["items"] = structural(node["items"], file)
    if isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = structural(node["additionalProperties"], file)
    elif made.get("type") == "object" and "properties" not in made and node.get("additionalProperties") is not False:
        made["x-kubernetes-preserve-unknown-fields"] = True
    return made


def definition(kind):
    (group, version), plural = GROUPS[kind], f"{kind.lower()}s"
    root = structural({"$ref": f"{FILES[kind]}#/$defs/{kind}"}, "")
    root["properties"] |= {"metadata": {"type": "object"}, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {"group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
                 "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": root}}]},
    }  # fmt: skip


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"https://127.0.0.1:{PORTS[0]}{path}", data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else {"message": text.decode()}


def post(manifest, name):
    group, version = GROUPS[manifest["kind"]]
    made = {**manifest, "metadata": {**manifest["metadata"], "name": name, "namespace": "default"}}
    return call(
        "POST", f"/apis/{group}/{version}/namespaces/default/{manifest['kind'].lower()}s?fieldValidation=Strict", made
    )


def wait(ready, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if ready():
                return
        time.sleep(0.2)
    raise TimeoutError


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory):
    folder = tmp_path_factory.mktemp("control-plane")
    client, peer = (f"http://127.0.0.1:{port}" for port in PORTS[1:])
    nothing = {"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:1"}}],
               "contexts": [{"name": "a", "context": {"cluster": "a", "user": ""}}], "current-context": "a"}  # fmt: skip
    (folder / "kubeconfig").write_text(json.dumps(nothing))  # it is asked for, and nothing needs it
    commands = (
        [ETCD, "--data-dir", folder / "etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
         "--listen-peer-urls", peer, "--log-level", "error"],
        [SERVER, f"--etcd-servers={client}", f"--secure-port={PORTS[0]}", "--bind-address=127.0.0.1", f"--cert-dir={folder}",
         f"--kubeconfig={folder}/kubeconfig", "--enable-priority-and-fairness=false"],
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "log", "w"))
        for command in commands:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        wait(lambda: call("GET", "/apis/apiextensions.k8s.io/v1")[0] == 200)
        for kind in GROUPS:
            status, answer = call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition(kind))
            assert status == 201, answer
        wait(
            lambda: all(
                call("GET", f"/apis/{group}/{version}/{kind.lower()}s")[0] == 200
                for kind, (group, version) in GROUPS.items()
            )
        )
        yield


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_manifest_is_stored_as_written(name, kind, control_plane):
    for manifest in render(JOBS[name], kind):
        if manifest["kind"] in GROUPS:
            status, stored = post(manifest, f"{name}-{kind}")
            assert (status, stored.get("spec")) == (201, manifest["spec"]), stored.get("message")
            status, answer = post({**manifest, "spec": {**manifest["spec"], "tpyo": 1}}, "bad")
            assert status == 400 and 'unknown field "spec.tpyo"' in answer["message"]


def test_an_msjob_is_stored_and_rules_are_evaluated(control_plane):
    assert post(PARALLEL, "ms-net")[1]["spec"] == PARALLEL["spec"]
    status, answer = post(render(JOBS["cpu"])[-1], "9-gpt")
    assert status == 422 and "metadata.name must match RFC 1035 DNS label format" in answer["message"]
