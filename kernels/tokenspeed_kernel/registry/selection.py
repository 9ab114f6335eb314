# SPDX-License-Identifier: MIT
"""Choosing a solution: filter by platform and signature, rank, cache; override; explain.

Overrides come from the process (environment variable, then `set_overrides`, which the `--kernel-override` flag
calls) or from the `override` context manager. An override is checked when it is given: a solution that does not
exist or that this machine cannot run is an error then, and one that does not fit a call is an error at that call.
A view holds one set of overrides with its own cache; the context variable makes the hot path two look-ups.
With `batch_invariant` only solutions take part whose rows do not depend on each other: what `--deterministic` asks for.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import torch

from tokenspeed_kernel.registry import discovery, spec, tuning
from tokenspeed_kernel.registry.errors import KernelError
from tokenspeed_kernel.registry.platform import Platform, current_platform
from tokenspeed_kernel.registry.spec import KernelSpec, Op, Signature, Solution

OVERRIDES_ENV = "TOKENSPEED_KERNEL_OVERRIDES"

_Key = tuple[str, str, torch.dtype, tuple[Hashable, ...]]


class Verdict(NamedTuple):
    """One line of `explain`: verdict is "chosen", "eligible" or "rejected"."""

    name: str
    verdict: str
    reason: str


class _View:
    """A set of overrides and the selections made under it."""

    def __init__(self, overrides: Mapping[str, str], batch_invariant: bool) -> None:
        self.overrides = dict(overrides)
        self.batch_invariant = batch_invariant
        self.cache: dict[_Key, Solution] = {}


_process_view: _View | None = None
_context_view: ContextVar[_View | None] = ContextVar("tokenspeed_kernel_overrides", default=None)


def parse_overrides(text: str) -> dict[str, str]:
    """Read "op=name,op=name"; empty parts are ignored. KernelError names a part that does not fit the form."""
    overrides: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        op, equals, name = part.partition("=")
        if not (op.strip() and equals and name.strip()):
            raise KernelError(f"kernel override {part!r} must read OPERATION=SOLUTION")
        overrides[op.strip()] = name.strip()
    return overrides


def set_overrides(overrides: Mapping[str, str], batch_invariant: bool = False) -> None:
    """Force solutions for the whole process, on top of the environment's; {} leaves only the environment's.

    batch_invariant: choose only among solutions that are.
    Raises KernelError when an operation or solution is unknown, this machine cannot run it or it is not invariant.
    """
    global _process_view
    discovery.load(everything=bool(overrides))
    merged = _environment_overrides() | dict(overrides)
    _check_overrides(merged, batch_invariant)
    _process_view = _View(merged, batch_invariant)


@contextlib.contextmanager
def override(overrides: Mapping[str, str]) -> Iterator[None]:
    """Force solutions inside the `with` block, in this thread or task only. Raises as `set_overrides` does."""
    discovery.load(everything=True)
    active = _active_view()
    _check_overrides(overrides, active.batch_invariant)
    token = _context_view.set(_View(active.overrides | dict(overrides), active.batch_invariant))
    try:
        yield
    finally:
        _context_view.reset(token)


def solve(op: Op, device: str, dtype: torch.dtype, *traits: Hashable) -> Solution:
    """The solution for a call, from the cache or by ranking; KernelError when none fits."""
    view = _context_view.get() or _process_view or _active_view()
    key = (op.name, device, dtype, traits)
    found = view.cache.get(key)
    if found is None:
        found = view.cache[key] = _choose(op, Signature(device, dtype, traits), view).fn
    return found


def select(op: str, signature: Signature) -> KernelSpec:
    """The solution chosen for `op` on `signature` on this machine; KernelError when none fits."""
    spec.specs_of(op)
    return _choose(spec.operations()[op], signature, _active_view())


def solutions(op: str) -> list[KernelSpec]:
    """Every solution of `op` that can be imported here, best rank first, whatever the platform."""
    discovery.load(everything=True)
    return sorted(spec.specs_of(op).values(), key=lambda item: item.rank, reverse=True)


def explain(
    op: str,
    *,
    platform: Platform | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
    batch_invariant: bool | None = None,
    **traits: Hashable,
) -> list[Verdict]:
    """Who would win a call, and why the others would not, best first.

    device: torch device type; dtype: activation dtype or its name, None to leave open; traits by name, those left
    out are left open. platform: the machine to decide for, this one when None. batch_invariant: see
    `set_overrides`; None for as this process is set.
    Raises KernelError for an unknown operation, trait or dtype.
    """
    ranked = solutions(op)
    known = spec.operations()[op].trait_names
    if unknown := sorted(set(traits) - set(known)):
        raise KernelError(f"{op} has no trait {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    machine = platform or current_platform()
    view = _active_view()
    forced = view.overrides.get(op)
    invariant = view.batch_invariant if batch_invariant is None else batch_invariant
    tuned = _tuned_name(op, machine, device, _as_dtype(dtype), traits)
    # What was measured goes before what is ranked.
    ranked = sorted(ranked, key=lambda item: item.name != tuned)
    verdicts: list[Verdict] = []
    winner: str | None = None
    for item in ranked:
        reason = item.needs.unmet(machine) or item.misfit(device, _as_dtype(dtype), traits)
        if reason is None and invariant:
            reason = _variance(item)
        if reason is None and forced not in (None, item.name):
            reason = f"overridden by {forced}"
        if reason is not None:
            verdicts.append(Verdict(item.name, "rejected", reason))
        elif winner is None:
            winner = item.name
            verdicts.append(Verdict(item.name, "chosen", _why_chosen(item, forced, tuned)))
        elif winner == tuned:
            verdicts.append(Verdict(item.name, "eligible", f"measured slower than {winner}"))
        else:
            verdicts.append(Verdict(item.name, "eligible", f"{item.band.name.lower()} ranks below {winner}"))
    verdicts.extend(Verdict(module, "rejected", why) for module, why in discovery.unavailable(op))
    return verdicts


def _why_chosen(item: KernelSpec, forced: str | None, tuned: str | None) -> str:
    if forced == item.name:
        return "forced by override"
    if tuned == item.name:
        return f"measured fastest ({tuning.tuning_path()})"
    return f"highest rank that fits ({item.band.name.lower()})"


def _tuned_name(
    op: str, machine: Platform, device: str, dtype: torch.dtype | None, traits: Mapping[str, Hashable]
) -> str | None:
    """The tuning table's word on a call whose every trait is given."""
    names = spec.operations()[op].trait_names
    if dtype is None or set(names) - set(traits):
        return None
    return _tuned(machine).get(tuning.call_key(op, device, dtype, {name: traits[name] for name in names}))


def _active_view() -> _View:
    global _process_view
    view = _context_view.get() or _process_view
    if view is None:
        overrides = _environment_overrides()
        discovery.load(everything=bool(overrides))
        _check_overrides(overrides, False)
        view = _process_view = _View(overrides, False)
    return view


def _environment_overrides() -> dict[str, str]:
    return parse_overrides(os.environ.get(OVERRIDES_ENV, ""))


def _variance(item: KernelSpec) -> str | None:
    """Why a solution may not serve a process whose rows must not depend on each other."""
    return None if item.batch_invariant else "not batch-invariant, as --deterministic asks"


def _check_overrides(overrides: Mapping[str, str], batch_invariant: bool) -> None:
    for op, name in overrides.items():
        known = spec.specs_of(op)
        if name not in known:
            raise KernelError(f"kernel override {op}={name}: no such solution; known: {', '.join(sorted(known))}")
        reason = known[name].needs.unmet(current_platform())
        if reason is None and batch_invariant:
            reason = _variance(known[name])
        if reason:
            raise KernelError(f"kernel override {op}={name}: {reason}")


def _choose(op: Op, signature: Signature, view: _View) -> KernelSpec:
    """Rank what fits. An override that does not fit the call is an error, never a silent fallback."""
    traits = dict(zip(op.trait_names, signature.traits, strict=True))
    known = spec.specs_of(op.name)
    forced = view.overrides.get(op.name)
    if forced is not None:
        if reason := known[forced].misfit(signature.device, signature.dtype, traits):
            raise KernelError(f"kernel override {op.name}={forced} does not fit this call: {reason}")
        return known[forced]
    platform = current_platform()
    fitting = [
        item
        for item in known.values()
        if item.needs.unmet(platform) is None
        and item.misfit(signature.device, signature.dtype, traits) is None
        and (item.batch_invariant or not view.batch_invariant)
    ]
    if not fitting:
        call = ", ".join(f"{trait}={value}" for trait, value in traits.items())
        kind = "batch-invariant solution" if view.batch_invariant else "solution"
        raise KernelError(f"no {kind} of {op.name} fits device={signature.device}, dtype={signature.dtype}, {call}")
    tuned = _tuned(platform).get(tuning.call_key(op.name, signature.device, signature.dtype, traits))
    return max(fitting, key=lambda item: (item.name == tuned, item.rank))


@functools.cache
def _tuned(platform: Platform) -> dict[str, str]:
    """What the tuning table says for this machine; read once."""
    return tuning.read_table(tuning.tuning_path()).get(platform.describe(), {})


def forget_tuning() -> None:
    """Read the tuning table again at the next selection."""
    _tuned.cache_clear()
    _forget_selections()


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise KernelError(f"unknown dtype {dtype!r}; use a torch name such as float32 or bfloat16")
    return found


def _forget_selections() -> None:
    for view in (_process_view, _context_view.get()):
        if view is not None:
            view.cache.clear()


spec.on_register(_forget_selections)
