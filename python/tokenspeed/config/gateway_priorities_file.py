# SPDX-License-Identifier: MIT
"""The file that `--priority-scheduler-config` names. `gateway_priorities.py` imports it only when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml


class ClassesRefused(Exception):
    """The file cannot be taken; the text names it and says why."""


class ClassInFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of one class; None: nothing."""

    reserved: int | None = None
    queue_size: int | None = None
    queue_timeout_secs: float | None = None
    starvation_threshold_secs: float | None = None
    can_preempt: bool | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    classes: dict[str, ClassInFile] | None = None
    tenant_policies: dict[str, Any] | None = None


def read_classes(path: str, known: Sequence[str]) -> dict[str, ClassInFile]:
    """By name, which is one of `known`, lowest first. Raises ClassesRefused."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        told = msgspec.convert(content or {}, _File)
    except OSError as error:
        raise ClassesRefused(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ClassesRefused(f"{path}: {' '.join(str(error).split())}") from None
    if told.tenant_policies:
        raise ClassesRefused(f"{path}: tenant_policies: keys are all equal, so there are no tenants")
    for name in told.classes or {}:
        if name not in known:
            raise ClassesRefused(f"{path}: classes.{name}: the classes are {', '.join(reversed(known))}")
    return told.classes or {}
