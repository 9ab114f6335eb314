# SPDX-License-Identifier: MIT
"""The gateway's settings of the priority scheduler: which class of requests gets a place first. Reads only the file
that `--priority-scheduler-config` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import Rows

if TYPE_CHECKING:
    from tokenspeed.config.gateway_priorities_file import ClassInFile

CLASSES = ("bulk", "default", "interactive", "system")
"""From the last to the first."""
_FILE = "--priority-scheduler-config"


@dataclass(frozen=True)
class ClassRules:
    """How requests of one class are let in."""

    reserved: int
    """Places that lower classes leave free for this one."""
    queue_size: int
    queue_timeout_s: float
    starvation_s: float
    """Whoever has waited for so long is next, whatever the classes of others."""
    may_preempt: bool
    """Whether a request of a lower class that has not begun to be answered is ended for one of this."""


@dataclass(frozen=True)
class PriorityConfig:
    """`most`: the highest class that callers get."""

    most: str
    classes: Mapping[str, ClassRules]

    def share(self, count: int) -> PriorityConfig:
        """The part of one of `count` processes."""
        parts = {
            name: replace(rules, reserved=rules.reserved // count, queue_size=-(-rules.queue_size // count))
            for name, rules in self.classes.items()
        }
        return replace(self, classes=parts)


DEFAULTS: Mapping[str, ClassRules] = {
    "system": ClassRules(32, 64, 30.0, 5.0, True),
    "interactive": ClassRules(128, 256, 30.0, 5.0, True),
    "default": ClassRules(0, 512, 60.0, 30.0, False),
    "bulk": ClassRules(0, 1024, 300.0, 120.0, False),
}

_flag = Rows("Limits")

PRIORITY_FLAGS: tuple[Flag, ...] = (
    _flag(
        "--priority-scheduler-enabled",
        "switch",
        False,
        "requests name a class (x-smg-priority: system, interactive, default or bulk), by which they get a place",
    ),
    _flag(
        "--priority-scheduler-default-max-class",
        "str",
        "default",
        "the highest class that a request gets",
        CLASSES,
    ),
    _flag(
        _FILE,
        "str",
        None,
        "YAML file with `classes`: reserved, queue_size, queue_timeout_secs, starvation_threshold_secs and can_preempt",
    ),
)


def priority_config(values: dict[str, Any], limit: int) -> PriorityConfig | None:
    """The slice of the parsed flags; None where it is off. limit: places, 0 for any number. Raises `FlagError`."""
    if not values["priority_scheduler_enabled"]:
        return None
    path = values["priority_scheduler_config"]
    given = {} if path is None else _classes_in(path)
    classes = {name: _with(name, rules, given.get(name)) for name, rules in DEFAULTS.items()}
    reserved = sum(rules.reserved for rules in classes.values())
    if limit and reserved > limit:
        message = f"its classes reserve {reserved} places, which is more than --max-concurrent-requests ({limit})"
        raise FlagError("--priority-scheduler-enabled", message)
    return PriorityConfig(values["priority_scheduler_default_max_class"], classes)


def _with(name: str, rules: ClassRules, given: ClassInFile | None) -> ClassRules:
    if given is None:
        return rules
    named = {
        "reserved": given.reserved,
        "queue_size": given.queue_size,
        "queue_timeout_s": given.queue_timeout_secs,
        "starvation_s": given.starvation_threshold_secs,
        "may_preempt": given.can_preempt,
    }
    changed = ClassRules(**{**asdict(rules), **{key: value for key, value in named.items() if value is not None}})
    if changed.queue_timeout_s <= 0 or changed.starvation_s <= 0:
        raise FlagError(_FILE, f"classes.{name}: queue_timeout_secs and starvation_threshold_secs must be above 0")
    if changed.reserved < 0 or changed.queue_size < 0:
        raise FlagError(_FILE, f"classes.{name}: reserved and queue_size must be 0 or more")
    return changed


def _classes_in(path: str) -> dict[str, ClassInFile]:
    # Here, because the tables of flags are also read where no package is installed (tools/docs/flags.py).
    from tokenspeed.config.gateway_priorities_file import ClassesRefused, read_classes

    try:
        return read_classes(path, CLASSES)
    except ClassesRefused as error:
        raise FlagError(_FILE, str(error)) from None
