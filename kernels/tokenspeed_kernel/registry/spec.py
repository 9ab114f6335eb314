# SPDX-License-Identifier: MIT
"""The vocabulary of the registry: operations, signatures, solutions, and the decorator that registers one.

An `Op` names an operation and the traits that may decide between its solutions. A `KernelSpec` is one solution.
Both live in process-wide tables filled while family modules are imported; nothing is ever removed from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from tokenspeed_kernel.registry.errors import KernelError
from tokenspeed_kernel.registry.requirements import Requirement

Solution = Callable[..., Any]
F = TypeVar("F", bound=Solution)
TraitRule = frozenset[Hashable] | Callable[[Any], bool]
JointRule = tuple[tuple[str, ...], Callable[..., bool]]

_KNOWN_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8})


class Band(enum.IntEnum):
    """How solutions that all fit are ranked; the highest band wins, then `KernelSpec.priority`, then the name."""

    REFERENCE = 0  # plain torch in float32: right, slow
    PORTABLE = 10  # one source for many machines: torch operators, Triton
    NATIVE = 20  # compiled for this kind of machine: our C++ and CUDA
    SPECIALISED = 30  # for one shape or one chip, where it was measured to win


class Signature(NamedTuple):
    """What selection knows of a call: device type, activation dtype, and the op's trait values in its order."""

    device: str
    dtype: torch.dtype
    traits: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """One registered solution.

    op: operation name; name: unique within the op; fn: called with exactly the arguments of the api function.
    needs: what the machine must have; dtypes: activation dtypes it takes.
    traits: per trait name the accepted values, or a predicate on the value; a trait not named accepts anything.
    fits: names of traits and a predicate on their values together, for what no trait decides alone; or None.
    band, priority: rank among the solutions that fit.
    batch_invariant: whether a row's result has the same bits whatever other rows there are and however many.
    """

    op: str
    name: str
    fn: Solution
    needs: Requirement
    dtypes: frozenset[torch.dtype]
    band: Band
    priority: int = 0
    traits: Mapping[str, TraitRule] = field(default_factory=dict)
    fits: JointRule | None = None
    batch_invariant: bool = True

    @property
    def rank(self) -> tuple[int, int, str]:
        """Sort key: the greatest wins."""
        return (self.band, self.priority, self.name)

    def misfit(self, device: str, dtype: torch.dtype | None, traits: Mapping[str, Hashable]) -> str | None:
        """Why this solution cannot serve such a call, or None when it can. Absent values are not checked."""
        if self.needs.device not in (None, device):
            return f"runs on {self.needs.device}, the call is on {device}"
        if dtype is not None and dtype not in self.dtypes:
            return f"takes {_names(self.dtypes)}, the call has {_dtype_name(dtype)}"
        for trait, rule in self.traits.items():
            if trait not in traits:
                continue
            value = traits[trait]
            if not (rule(value) if callable(rule) else value in rule):
                takes = rule.__name__.replace("_", " ") if callable(rule) else _names(rule)
                return f"{trait} must be {takes}, the call has {value}"
        return self._joint_misfit(traits)

    def _joint_misfit(self, traits: Mapping[str, Hashable]) -> str | None:
        if self.fits is None or not all(name in traits for name in self.fits[0]):
            return None
        names, rule = self.fits
        values = [traits[name] for name in names]
        if rule(*values):
            return None
        told = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        return f"must be {rule.__name__.replace('_', ' ')}, the call has {told}"


@dataclass(frozen=True, eq=False)
class Op:
    """A named operation and the traits, in order, that a call hands to selection.

    tiles_rows: a solution may cut its sums by how many rows there are, so each must say whether it does. Of other
    operations a row's result depends on that row alone.
    """

    name: str
    trait_names: tuple[str, ...]
    summary: str
    tiles_rows: bool = False


_OPS: dict[str, Op] = {}
_SPECS: dict[str, dict[str, KernelSpec]] = {}
_listeners: list[Callable[[], None]] = []


def declare_op(name: str, traits: Iterable[str] = (), summary: str = "", tiles_rows: bool = False) -> Op:
    """Declare an operation, see `Op`; KernelError when the name is taken."""
    if name in _OPS:
        raise KernelError(f"operation {name!r} is declared twice")
    op = _OPS[name] = Op(name, tuple(traits), summary, tiles_rows)
    _SPECS[name] = {}
    return op


def operations() -> dict[str, Op]:
    """Every declared operation by name."""
    return dict(_OPS)


def specs_of(op: str) -> dict[str, KernelSpec]:
    """The registered solutions of an operation by name; KernelError for an unknown operation."""
    if op not in _SPECS:
        raise KernelError(f"unknown operation {op!r}; known: {', '.join(sorted(_SPECS))}")
    return _SPECS[op]


def on_register(listener: Callable[[], None]) -> None:
    """Call `listener` after every registration, so that cached selections can be dropped."""
    _listeners.append(listener)


def kernel(
    op: str,
    *,
    name: str,
    needs: Requirement,
    dtypes: Iterable[torch.dtype],
    band: Band,
    priority: int = 0,
    traits: Mapping[str, Iterable[Hashable] | Callable[[Any], bool]] | None = None,
    fits: JointRule | None = None,
    batch_invariant: bool | None = None,
) -> Callable[[F], F]:
    """Decorator: register a function as a solution of `op`. The function itself is returned unchanged.

    The arguments are the fields of `KernelSpec`. batch_invariant: None for yes, or for no where the operation tiles
    rows.

    Raises KernelError for an unknown operation or trait, an unsupported dtype, or a name already taken.
    """
    known = specs_of(op)
    rules: dict[str, TraitRule] = {
        trait: rule if callable(rule) else frozenset(rule) for trait, rule in (traits or {}).items()
    }
    accepted = frozenset(dtypes)
    named = {*rules, *(fits[0] if fits else ())}
    if unknown := sorted(named - set(_OPS[op].trait_names)):
        raise KernelError(f"{op}={name}: unknown trait {unknown[0]!r}; known: {', '.join(_OPS[op].trait_names)}")
    if not accepted or accepted - _KNOWN_DTYPES:
        raise KernelError(f"{op}={name}: dtypes must be some of {_names(_KNOWN_DTYPES)}")

    def register(fn: F) -> F:
        if name in known:
            raise KernelError(f"{op}={name} is registered twice")
        invariant = not _OPS[op].tiles_rows if batch_invariant is None else batch_invariant
        known[name] = KernelSpec(op, name, fn, needs, accepted, band, priority, rules, fits, invariant)
        for listener in _listeners:
            listener()
        return fn

    return register


def _dtype_name(value: Hashable) -> str:
    return str(value).removeprefix("torch.")


def _names(values: Iterable[Hashable]) -> str:
    return "|".join(sorted(_dtype_name(value) for value in values))
