"""What a pod may do: the "restricted" profile of Kubernetes' Pod Security Standards, with the job's own fields in its place.

https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CONTEXT = "securityContext"


def restricted(fields: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a pod or a container, whose security context is the restricted one with their own in its place.

    >>> restricted({"name": "a", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}, CONTAINER)["securityContext"]
    {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL'], 'add': ['SYS_PTRACE']}}
    """
    return {**fields, CONTEXT: _merged(default, fields.get(CONTEXT) or {})}


def _merged(default: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(value, given[key])
        for key, value in default.items()
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping)
    }
    return {**default, **given, **both}
