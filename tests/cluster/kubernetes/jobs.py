"""Jobs of every kind of device, with everything that a description can say."""

from shardfn.cluster.kubernetes import Job, Storage

STORAGE = Storage("/checkpoints", "gpt", "1Ti", "fast")
COMMAND = ("python", "train.py", "--steps", "100")
EVERYTHING = {
    "retries": 3, "namespace": "training", "storage": STORAGE, "plan": "[mesh]\na = 16\n", "plan_name": "step.toml", "cpu": "8",
    "memory": "64Gi", "deadline_s": 3600, "ttl_s": 60, "labels": {"kueue.x-k8s.io/queue-name": "q"},
    "env": {"A": "1", "B": {"secretKeyRef": {"name": "a", "key": "b"}}},
    "pod": {"serviceAccountName": "trainer", "nodeSelector": {"zone": "a"}, "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [{"name": "metrics", "image": "metrics:1"}], "tolerations": [{"operator": "Exists"}]},
    "container": {"imagePullPolicy": "Always", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
}  # fmt: skip
JOBS = {
    "one": Job("gpt", "gpt:1", COMMAND),
    "cpu": Job("gpt", "gpt:1", COMMAND, processes=2, devices=4, retries=2),
    "gpu": Job("gpt", "gpt:1", COMMAND, processes=2, devices=8, device="h100:16", **EVERYTHING),
    "tpu": Job("gpt", "gpt:1", COMMAND, processes=4, devices=4, device="tpu-v5e:4x4", **EVERYTHING),
    "servers": Job("ctr", "ctr:1", COMMAND, processes=4, devices=1, device="gpu", servers=2, **EVERYTHING),
    "servers-tpu": Job("ctr", "ctr:1", COMMAND, processes=4, devices=4, device="tpu-v5e:4x4", servers=2),
}
ALONE = ("trainjob", "jobset")
ON_RAY = ("rayjob", "raycluster")
CASES = [(name, kind) for name, job in JOBS.items() for kind in (ON_RAY if job.servers else ALONE)]
