"""`python -m shardfn k8s render job.toml | check manifest.yaml --plan plan.toml`: jobs on Kubernetes."""

from __future__ import annotations

import argparse
from typing import Any

from shardfn.cluster import kubernetes
from shardfn.cluster.kubernetes.job import job_of
from shardfn.cluster.kubernetes.msjob import is_msjob
from shardfn.errors import ClusterError, fail


def add(commands: Any) -> None:
    """Add `k8s` and its own commands to those of the command line."""
    parser = commands.add_parser("k8s", help="write Kubernetes manifests of a job, and compare them with a plan")
    rows = parser.add_subparsers(required=True, metavar="render | check")
    render = rows.add_parser(
        "render", help="print the manifests of a job as YAML",
        description="Print the manifests of a job: of its description (TOML or YAML), or of MindSpore's MSJob.",
        epilog="example: python -m shardfn k8s render job.toml | kubectl apply -f -",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    render.add_argument("file", metavar="FILE", help="the description, or an MSJob")
    kinds = ", ".join(kubernetes.KINDS)
    render.add_argument("--kind", metavar="KIND", help=f"{kinds}; rayjob with parameter servers, else trainjob")
    render.add_argument(
        "--network-policy", action="store_true", help="add a NetworkPolicy: only the job's own pods reach its pods"
    )
    render.set_defaults(command=_render, platform=None, starts_devices=False)
    check = rows.add_parser(
        "check", help="compare a manifest with a plan",
        description="Compare a manifest with a plan: processes, devices, the shape of a TPU slice, memory.",
        epilog="example: python -m shardfn k8s check job.yaml --plan step.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    check.add_argument("file", metavar="FILE", help="YAML with a JobSet, TrainJob, RayJob, RayCluster or MSJob")
    check.add_argument("--plan", required=True, metavar="FILE", help="a layout file, as plan --save writes it")
    check.set_defaults(command=_check, platform=None, starts_devices=False)


def _render(options: argparse.Namespace) -> None:
    documents = kubernetes.read(options.file)
    if len(documents) != 1:
        fail(ClusterError, f"{options.file} has {len(documents)} documents", where=options.file,
             why="one job is described", fix="write each job in a file of its own")  # fmt: skip
    [document] = documents
    told: tuple[str, ...] = ()
    if is_msjob(document):
        job, told = kubernetes.translate(document, options.file)
    else:
        job = job_of(document, options.file)
    manifests = kubernetes.render(job, options.kind, network_policy=options.network_policy)
    print(kubernetes.dump(manifests, (*told, *kubernetes.notes(job))), end="")


def _check(options: argparse.Namespace) -> None:
    print(kubernetes.check(kubernetes.read(options.file), options.plan, options.file))
