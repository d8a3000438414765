"""Jobs on Kubernetes: one short description to manifests, MindSpore's `MSJob` to a description, a manifest against a plan.

| module | holds |
|---|---|
| `job` | `Job`: the description, from TOML or YAML |
| `targets` | a target's resource, node labels and devices of each process |
| `grace`, `security` | how long a pod may take to end; what it may do |
| `pods` | a process as a pod template |
| `jobset`, `trainjob`, `ray` | manifests of JobSet, Kubeflow Trainer and KubeRay |
| `network` | a NetworkPolicy around a job |
| `render` | which of them a job becomes, with its volume claim and its plan; notes |
| `msjob` | MindSpore's `MSJob`, read and translated |
| `plan_check` | a manifest compared with a plan |
| `files` | TOML and YAML, in and out; needs PyYAML |

Manifests are plain dicts.
"""

from shardfn.cluster.kubernetes.files import dump, read
from shardfn.cluster.kubernetes.job import Job, Storage, read_job
from shardfn.cluster.kubernetes.msjob import translate
from shardfn.cluster.kubernetes.plan_check import Allocation, allocation, check
from shardfn.cluster.kubernetes.render import KINDS, notes, render

__all__ = [
    "KINDS",
    "Allocation",
    "Job",
    "Storage",
    "allocation",
    "check",
    "dump",
    "notes",
    "read",
    "read_job",
    "render",
    "translate",
]


def __dir__() -> list[str]:
    return __all__
