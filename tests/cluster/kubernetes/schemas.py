"""The pinned schemas of the custom resources, and what of a manifest they refuse."""

import functools
import json
import pathlib

import jsonschema
import referencing

FOLDER = pathlib.Path(__file__).parent / "crds"
FILES = {
    "JobSet": "jobset.json", "TrainJob": "trainer.json", "TrainingRuntime": "trainer.json", "RayJob": "ray.json",
    "RayCluster": "ray.json", "MSJob": "msjob.json", "PersistentVolumeClaim": "kubernetes.json", "ConfigMap": "kubernetes.json",
    "Service": "kubernetes.json", "NetworkPolicy": "kubernetes.json",
}  # fmt: skip


@functools.cache
def schema(file):
    return json.loads((FOLDER / file).read_text())


@functools.cache
def validator(kind):
    draft = referencing.jsonschema.DRAFT202012
    registry = referencing.Registry().with_resources(
        (f, draft.create_resource(schema(f))) for f in sorted(set(FILES.values()))
    )
    return jsonschema.Draft202012Validator({"$ref": f"{FILES[kind]}#/$defs/{kind}"}, registry=registry)


def faults(manifest):
    """What a manifest's schema refuses, as `path: message`."""
    return [
        f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator(manifest["kind"]).iter_errors(manifest)
    ]
