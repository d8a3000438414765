"""`shardfn k8s`: manifests on the command line, and compared with a plan."""

import sys

import pytest
import yaml

from shardfn.cli.main import main
from shardfn.cluster.kubernetes import Job, allocation, render
from tests.cluster.kubernetes.jobs import CASES, JOBS
from tests.cluster.kubernetes.test_msjob import PARALLEL, SINGLE

LAYOUT = '# Estimated per call and device: 7 µs, 96 B sent, peak memory {peak:,} B.\nformat = "shardfn-layout"\nversion = 2\n'


@pytest.fixture
def plan(tmp_path):
    def written(device, axes, peak=1 << 30):
        path = tmp_path / "step.toml"
        text = LAYOUT.format(peak=peak) + (f'device = "{device}"\n' if device else "") + "[mesh]\n"
        path.write_text(text + "".join(f"{k} = {v}\n" for k, v in axes.items()))
        return path

    return written


@pytest.fixture
def checked(tmp_path, capsys):
    """What `shardfn k8s check` prints for a job's manifests, or the problems that it finds."""

    def run(manifests, path):
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump_all(manifests))
        status = main(["k8s", "check", str(file), "--plan", str(path)])
        out = capsys.readouterr()
        return out.out.strip() if status == 0 else out.err

    return run


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_manifest_says_what_its_job_did(name, kind):
    job, found = JOBS[name], allocation(render(JOBS[name], kind))
    assert (found.processes, found.devices) == (job.processes, job.devices)
    assert found.platform == {"h100:16": "gpu", "tpu-v5e:4x4": "tpu"}.get(job.device, job.device)
    chips = {"h100:16": ("h100", ""), "tpu-v5e:4x4": ("tpu-v5e", "4x4")}
    assert (found.chip, found.shape) == chips.get(job.device, ("", ""))
    assert found.memory == (64 << 30 if job.memory else None)


def test_msjobs_are_read_too():
    assert (allocation([PARALLEL]).processes, allocation([SINGLE]).processes, allocation([SINGLE]).memory) == (
        4,
        1,
        16 << 30,
    )


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_what_fits(kind, plan, checked):
    said = checked(render(JOBS["tpu"], kind), plan("tpu-v5e:4x4", {"a": 16}))
    assert said.endswith(" gpt: 4 processes × 4 devices (tpu-v5e:4x4); the plan needs 1 GiB of each device")
    assert "2 processes × 8 devices (h100)" in checked(render(JOBS["gpu"], kind), plan("", {"a": 4, "b": '"left"'}))


@pytest.mark.parametrize(
    ("job", "device", "axes", "peak", "says"),
    [
        (JOBS["tpu"], "tpu-v5e:4x8", {"a": 32}, 1, "the manifest has 16 devices, and the plan 32"),
        (JOBS["gpu"], "", {"a": 6, "b": '"left"'}, 1, "the manifest has 16 devices, and the plan a multiple of 6"),
        (JOBS["gpu"], "tpu-v5e:16", {"a": 16}, 1, "the manifest asks for GPU devices, and the plan is for tpu-v5e:16"),
        (JOBS["tpu"], "tpu-v6e:4x4", {"a": 16}, 1, "the node labels name tpu-v5e, and the plan is for tpu-v6e:4x4"),
        (JOBS["tpu"], "tpu-v5e:2x8", {"a": 16}, 1, "the slice has the shape 4x4, and the plan is for tpu-v5e:2x8"),
        (JOBS["tpu"], "tpu-v5e:4x4", {"a": 16}, 40 << 30, "the plan needs 40 GiB of each device, and tpu-v5e has "),
        (JOBS["gpu"], "h100:16", {"a": 16}, 100 << 30, "the plan needs 100 GiB of each device, and h100 has "),
        (
            Job("a", "a:1", ("a",), 2, 4, memory="8Gi"),
            "cpu:8",
            {"a": 8},
            3 << 30,
            "4 devices need 12 GiB, and a pod has 8 GiB",
        ),
    ],
)
def test_what_differs(job, device, axes, peak, says, plan, checked):
    assert says in checked(render(job, "jobset"), plan(device, axes, peak))


def test_a_group_of_another_size(plan, checked):
    [made] = render(JOBS["cpu"], "jobset")
    made["spec"]["replicatedJobs"][0]["template"]["spec"].update(parallelism=4, completions=4)
    assert "JAX_NUM_PROCESSES is 2, and there are 4 pods" in checked([made], plan("", {"a": 16}))
    assert "the file has no job" in checked([{"kind": "Pod"}], plan("", {"a": 16}))
    assert "JobSet a is not complete" in checked(
        [{"kind": "JobSet", "metadata": {"name": "a"}, "spec": {}}], plan("", {"a": 1})
    )


def test_render_on_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "job.toml").write_text(
        'name = "gpt"\nimage = "gpt:1"\nscript = "train.py"\ndevice = "tpu-v5e:4x4"\nretries = 3\n'
    )
    (tmp_path / "msjob.yaml").write_text(yaml.safe_dump(PARALLEL))
    assert main(["k8s", "render", str(tmp_path / "job.toml"), "--kind", "jobset"]) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == render(
        Job("gpt", "gpt:1", ("python", "train.py"), 4, 4, "tpu-v5e:4x4", 3), "jobset"
    )
    assert main(["k8s", "render", str(tmp_path / "msjob.yaml")]) == 0
    assert capsys.readouterr().out.startswith(
        "# the image registry.example.com/net:1 and its script have to be of JAX: shardfn.mindspore in the place of mindspore\n"
        "# the Scheduler gets no pod: process 0 does its work\n# the job has succeeded"
    )
    (tmp_path / "stored.toml").write_text(
        'name = "gpt"\nimage = "gpt:1"\nscript = "train.py"\n[storage]\npath = "/a"\nclaim = "a"\n'
    )
    assert main(["k8s", "render", str(tmp_path / "stored.toml"), "--network-policy"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# nothing says how large the state is") and "kind: NetworkPolicy" in out
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    assert main(["k8s", "render", str(tmp_path / "bad.yaml")]) == 2
    assert "cannot be read as YAML" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["k8s", "render", str(tmp_path / "msjob.yaml")]) == 2
    err = capsys.readouterr().err
    assert "Kubernetes manifests need PyYAML, which is not installed" in err and 'pip install ".[k8s]"' in err


def test_pods_of_a_job_that_run_at_once_count():
    def processes(**numbers):
        (made,) = [m for m in render(JOBS["gpu"], "jobset") if m["kind"] == "JobSet"]
        spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
        del spec["parallelism"], spec["completions"]
        spec.update(numbers)
        return allocation([made]).processes

    assert (
        processes(completions=2, parallelism=1)
        == processes(completions=2)
        == processes(completions=1, parallelism=2)
        == 1
    )
    assert processes(parallelism=2) == processes(completions=2, parallelism=2) == 2


def test_the_container_with_the_devices_counts():
    (made,) = [m for m in render(JOBS["gpu"], "jobset") if m["kind"] == "JobSet"]
    before, pod = allocation([made]), made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "log", "image": "log:1", "env": None})
    assert allocation([made]) == before


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_parameter_servers_are_no_devices_of_a_plan(kind, plan, checked):
    for job, devices in (
        (Job("a", "a:1", ("a",), 1, 8, "gpu", servers=10), 8),
        (Job("a", "a:1", ("a",), 2, 4, servers=4), 8),
    ):
        found = allocation(render(job, kind))
        assert (found.processes, found.devices, found.platform) == (job.processes, job.devices, job.device)
        assert f"{job.devices} devices ({job.device})" in checked(render(job, kind), plan("", {"a": devices}))


@pytest.mark.parametrize(
    ("labels", "chip"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "a100-40gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}, "a100-40gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-80GB-PCIe"}, "a100"),
        ({"nvidia.com/gpu.product": "NVIDIA-L4"}, ""),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100", "nvidia.com/gpu.product": "NVIDIA-H200"}, ""),
    ],
)
def test_labels_of_nodes_name_a_chip(labels, chip):
    made = render(Job("gpt", "gpt:1", ("a",), device="gpu", pod={"nodeSelector": labels}), "jobset")
    assert allocation(made).chip == chip
