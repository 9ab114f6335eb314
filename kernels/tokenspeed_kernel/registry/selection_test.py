# SPDX-License-Identifier: MIT
"""Selection by platform, dtype, traits and rank; overrides; explanations; plugins that do not load."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.explain import main as explain_main
from tokenspeed_kernel.registry import (
    OVERRIDES_ENV,
    Band,
    KernelError,
    Op,
    Platform,
    Signature,
    anywhere,
    cpu,
    cuda,
    declare_op,
    discovery,
    explain,
    kernel,
    override,
    parse_overrides,
    select,
    selection,
    set_overrides,
    solutions,
    solve,
    spec,
)
from tokenspeed_kernel.registry.platform import parse_cpu_features

F32, BF16 = torch.float32, torch.bfloat16
LAPTOP = Platform("x86_64", frozenset({"avx2", "fma"}), None)
HOPPER = Platform("x86_64", frozenset({"avx2", "fma", "avx512f"}), (9, 0), "H")
AMPERE = Platform("x86_64", frozenset(), (8, 6), "A")

_names = itertools.count()


@pytest.fixture
def op() -> Op:
    """An operation of two traits with solutions on every kind of machine."""
    op = declare_op(f"test.op{next(_names)}", ("head_dim", "layout"))
    every = {F32, BF16}

    def add(name: str, needs, dtypes, band: Band, **kwargs) -> None:  # type: ignore[no-untyped-def]
        kernel(op.name, name=name, needs=needs, dtypes=dtypes, band=band, **kwargs)(lambda: name)

    add("reference", anywhere(), every, Band.REFERENCE)
    add("simd", cpu("avx2"), {F32}, Band.NATIVE, traits={"head_dim": {64, 128}})
    add("wide", cpu("avx9000"), {F32}, Band.SPECIALISED)
    add("portable", cuda(8), every, Band.PORTABLE)
    add("hopper", cuda(9, only_major=True), {BF16}, Band.NATIVE)
    return op


def verdicts(op: Op, **call: object) -> dict[str, tuple[str, str]]:
    return {name: (verdict, reason) for name, verdict, reason in explain(op.name, **call)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("platform", "device", "dtype", "traits", "winner"),
    [
        (LAPTOP, "cpu", F32, {"head_dim": 64}, "simd"),
        (LAPTOP, "cpu", F32, {"head_dim": 80}, "reference"),
        (LAPTOP, "cpu", BF16, {"head_dim": 64}, "reference"),
        (HOPPER, "cuda", BF16, {}, "hopper"),
        (HOPPER, "cuda", F32, {}, "portable"),
        (HOPPER, "cpu", F32, {"head_dim": 128}, "simd"),
        (AMPERE, "cuda", BF16, {}, "portable"),
    ],
)
def test_highest_rank_that_fits_machine_and_call_wins(op, platform, device, dtype, traits, winner) -> None:  # type: ignore[no-untyped-def]
    found = verdicts(op, platform=platform, device=device, dtype=dtype, **traits)
    assert [name for name, (verdict, _) in found.items() if verdict == "chosen"] == [winner]


def test_losers_are_told_why(op: Op) -> None:
    found = verdicts(op, platform=AMPERE, device="cuda", dtype="float32", head_dim=80)
    assert found["simd"] == ("rejected", "needs cpu avx2")
    assert found["hopper"][1] == "needs compute capability 9.0 or later, this GPU has 8.6".replace(" or later", "")
    assert found["reference"] == ("eligible", "reference ranks below portable")
    on_laptop = verdicts(op, platform=LAPTOP, device="cpu", dtype="float32", head_dim=80)
    assert on_laptop["simd"][1] == "head_dim must be 128|64, the call has 80"
    assert on_laptop["portable"][1] == "needs a cuda device, this machine has none"


def test_name_breaks_a_tie_of_band_and_priority(op: Op) -> None:
    for name in ("a", "b"):
        kernel(op.name, name=name, needs=anywhere(), dtypes={F32}, band=Band.SPECIALISED, priority=1)(lambda: None)
    assert select(op.name, Signature("cpu", F32, (1, "x"))).name == "b"


def test_solved_call_returns_the_function_and_a_later_registration_is_seen(op: Op) -> None:
    first = solve(op, "cpu", BF16, 64, "x")
    assert first() == "reference"
    kernel(op.name, name="newer", needs=cpu(), dtypes={BF16}, band=Band.NATIVE)(lambda: "newer")
    assert solve(op, "cpu", BF16, 64, "x")() == "newer"


def test_predicate_decides_on_a_trait(op: Op) -> None:
    def power_of_two(value: int) -> bool:
        return value & (value - 1) == 0

    kernel(op.name, name="pow", needs=cpu(), dtypes={BF16}, band=Band.NATIVE, traits={"head_dim": power_of_two})(
        lambda: None
    )
    assert select(op.name, Signature("cpu", BF16, (32, "x"))).name == "pow"
    found = verdicts(op, platform=LAPTOP, device="cpu", dtype=BF16, head_dim=48)
    assert found["pow"][1] == "head_dim must be power of two, the call has 48"


def test_rule_over_several_traits_decides_where_all_of_them_are_known(op: Op) -> None:
    def small_in_that_layout(head_dim: int, layout: str) -> bool:
        return head_dim <= 64 or layout == "tall"

    fits = (("head_dim", "layout"), small_in_that_layout)
    kernel(op.name, name="joint", needs=cpu(), dtypes={BF16}, band=Band.NATIVE, fits=fits)(lambda: None)
    assert select(op.name, Signature("cpu", BF16, (64, "flat"))).name == "joint"
    assert select(op.name, Signature("cpu", BF16, (128, "tall"))).name == "joint"
    assert select(op.name, Signature("cpu", BF16, (128, "flat"))).name == "reference"
    found = verdicts(op, platform=LAPTOP, device="cpu", dtype=BF16, head_dim=128, layout="flat")
    assert found["joint"][1] == "must be small in that layout, the call has head_dim=128, layout=flat"
    assert verdicts(op, platform=LAPTOP, device="cpu", dtype=BF16, head_dim=128)["joint"][0] == "chosen"


def test_call_that_nothing_fits_is_an_error_that_names_it() -> None:
    bare = declare_op(f"test.op{next(_names)}", ("size",))
    with pytest.raises(KernelError, match=rf"no solution of {bare.name} fits device=cpu, .*float32, size=3"):
        solve(bare, "cpu", F32, 3)


def test_override_holds_inside_its_block_only(op: Op) -> None:
    assert solve(op, "cpu", F32, 64, "x")() == "simd"
    with override({op.name: "reference"}):
        assert solve(op, "cpu", F32, 64, "x")() == "reference"
        assert verdicts(op, device="cpu", dtype=F32)["simd"] == ("rejected", "overridden by reference")
    assert solve(op, "cpu", F32, 64, "x")() == "simd"


def test_override_for_the_process_holds_until_it_is_lifted(op: Op) -> None:
    set_overrides({op.name: "reference"})
    try:
        assert solve(op, "cpu", F32, 64, "x")() == "reference"
    finally:
        set_overrides({})
    assert solve(op, "cpu", F32, 64, "x")() == "simd"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda op: {op.name: "nope"}, "=nope: no such solution; known: hopper, portable, reference, simd, wide"),
        (lambda op: {op.name: "wide"}, "=wide: needs cpu avx9000"),
        (lambda op: {"no.such": "x"}, "unknown operation 'no.such'"),
    ],
)
def test_override_that_cannot_hold_is_refused_at_once(
    op: Op, make: Callable[[Op], dict[str, str]], message: str
) -> None:
    with pytest.raises(KernelError, match=message), override(make(op)):
        pass
    with pytest.raises(KernelError, match=message):
        set_overrides(make(op))


def test_override_that_does_not_fit_a_call_is_an_error_not_a_fallback(op: Op) -> None:
    with override({op.name: "simd"}), pytest.raises(KernelError, match="does not fit this call: head_dim must be"):
        solve(op, "cpu", F32, 80, "x")


def test_override_text_is_read_and_malformed_parts_named() -> None:
    assert parse_overrides("a.b=c, d.e=f,") == {"a.b": "c", "d.e": "f"}
    with pytest.raises(KernelError, match=r"'a\.b' must read OPERATION=SOLUTION"):
        parse_overrides("a.b")


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The state before anything was selected: the environment is read again."""
    monkeypatch.setattr(selection, "_process_view", None)
    return monkeypatch


def test_environment_forces_a_solution(op: Op, fresh_process: pytest.MonkeyPatch) -> None:
    fresh_process.setenv(OVERRIDES_ENV, f"{op.name}=reference")
    assert solve(op, "cpu", F32, 64, "x")() == "reference"


def test_wrong_name_in_the_environment_is_refused(fresh_process: pytest.MonkeyPatch) -> None:
    fresh_process.setenv(OVERRIDES_ENV, "norm.rms=quantum")
    with pytest.raises(KernelError, match=r"kernel override norm\.rms=quantum: no such solution"):
        api.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)


def test_explain_lists_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_main([]) == 0
    assert "attention.paged: causal attention" in capsys.readouterr().out


def test_explain_tells_who_won_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_main(["norm.rms", "device=cpu", "dtype=float32"]) == 0
    out = capsys.readouterr().out
    assert "call: device=cpu, dtype=float32" in out
    assert "chosen" in out and "needs a cuda device" in out


def test_explain_tells_what_a_deterministic_process_may_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_main(["gemm.linear", "device=cpu", "dtype=float32", "batch_invariant=true"]) == 0
    told = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert "not batch-invariant, as --deterministic asks" in told["reference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm.rms", "colour=red"], "norm.rms has no trait 'colour'; known: hidden, weight_dtype"),
        (["norm.rms", "colour"], "'colour' must read NAME=VALUE"),
        (["norm.rms", "batch_invariant=no"], "batch_invariant must be true or false, got no"),
        (["norm.rms", "dtype=float31"], "unknown dtype 'float31'; use a torch name such as float32 or bfloat16"),
    ],
)
def test_explain_refuses_what_it_cannot_read(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_main(arguments) == 2
    assert capsys.readouterr().err == f"ts kernels explain: error: {message}\n"


@pytest.mark.parametrize("value", ["no_such_module_for_a_kernel_plugin", "tokenspeed_kernel.registry:no_such_name"])
def test_plugin_that_does_not_import_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("mine", value, discovery.PLUGIN_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    with pytest.raises(KernelError, match=r"kernel plugin 'mine' \(.*\) does not import: .*; fix or uninstall it"):
        discovery.load_plugins()


def test_plugin_callable_registers_its_solutions(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "mine", "somewhere:register"

        def load(self) -> Callable[[], object]:
            return lambda: kernel(op.name, name="plugged", needs=anywhere(), dtypes={F32}, band=Band.SPECIALISED)(
                lambda: "plugged"
            )

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    discovery.load_plugins()
    assert solve(op, "cpu", F32, 80, "x")() == "plugged"


def _register(op: str, name: str = "x", **changes: object) -> None:
    settings = {"needs": anywhere(), "dtypes": {F32}, "band": Band.NATIVE} | changes
    kernel(op, name=name, **settings)(lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda op: _register(op, traits={"tail": {1}}), "unknown trait 'tail'"),
        (lambda op: _register(op, fits=(("head_dim", "tail"), max)), "unknown trait 'tail'"),
        (lambda op: _register(op, dtypes=()), "dtypes must be some of"),
        (lambda op: _register(op, name="simd"), "registered twice"),
        (declare_op, "declared twice"),
    ],
)
def test_registration_mistakes_are_refused(op: Op, register: Callable[[str], object], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        register(op.name)


def test_cpu_features_come_from_the_first_processor() -> None:
    text = "processor\t: 0\nflags\t\t: fpu avx2 FMA\n\nprocessor\t: 1\nflags\t\t: sse\n"
    assert parse_cpu_features(text) == {"fpu", "avx2", "fma"}
    assert parse_cpu_features("Features : asimd sve\n") == {"asimd", "sve"}
    assert parse_cpu_features("") == frozenset()


@pytest.fixture
def product() -> Op:
    """An operation whose fastest solution sums by the number of rows."""
    op = declare_op(f"test.op{next(_names)}", ("tokens",), tiles_rows=True)
    kernel(op.name, name="split", needs=anywhere(), dtypes={F32}, band=Band.NATIVE)(lambda: "split")
    kernel(op.name, name="fixed", needs=anywhere(), dtypes={F32}, band=Band.PORTABLE, batch_invariant=True)(
        lambda: "fixed"
    )
    return op


def test_a_deterministic_process_takes_batch_invariant_solutions_only(product: Op, op: Op) -> None:
    assert solve(product, "cpu", F32, 1)() == "split"
    found = verdicts(product, dtype=F32, batch_invariant=True)
    assert found["split"] == ("rejected", "not batch-invariant, as --deterministic asks")
    assert found["fixed"][0] == "chosen"
    try:
        set_overrides({}, batch_invariant=True)
        assert solve(product, "cpu", F32, 1)() == "fixed"
        assert verdicts(product, dtype=F32)["split"][0] == "rejected"
        with pytest.raises(KernelError, match="split: not batch-invariant"):
            set_overrides({product.name: "split"}, batch_invariant=True)
        with pytest.raises(KernelError, match="not batch-invariant"), override({product.name: "split"}):
            pass
        # Where rows cannot meet, every solution will do.
        assert solve(op, "cpu", F32, 64, "rows")() == "simd"
    finally:
        set_overrides({})
    assert solve(product, "cpu", F32, 1)() == "split"


def test_a_call_without_a_batch_invariant_solution_is_told_so() -> None:
    op = declare_op(f"test.op{next(_names)}", tiles_rows=True)
    kernel(op.name, name="split", needs=anywhere(), dtypes={F32}, band=Band.NATIVE)(lambda: "split")
    try:
        set_overrides({}, batch_invariant=True)
        with pytest.raises(KernelError, match="no batch-invariant solution of test"):
            solve(op, "cpu", F32)
    finally:
        set_overrides({})


def test_every_solution_of_the_cpu_that_tiles_rows_says_that_it_is_batch_invariant() -> None:
    tiling = [name for name, op in spec.operations().items() if op.tiles_rows and not name.startswith("test.")]
    assert {"gemm.linear", "gemm.logits", "attention.paged", "moe.experts"} <= set(tiling)
    of_cpu = [item for name in tiling for item in solutions(name) if item.needs.device == "cpu"]
    assert of_cpu
    assert all(item.batch_invariant for item in of_cpu)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_deterministic_gpu_has_dense_products_attention_and_experts(dtype: str) -> None:
    calls: dict[str, dict[str, Any]] = {
        "gemm.linear": {"weight_format": dtype, "weight_layout": "rows"},
        "gemm.linear_silu_and_mul": {},
        "gemm.linear_add": {"weight_format": dtype, "weight_layout": "rows"},
        "gemm.logits": {"weight_format": dtype, "weight_layout": "rows"},
        "attention.paged": {"head_dim": 128, "block_size": 16},
        "attention.mla": {"latent_dim": 512, "key_dim": 64, "block_size": 16},
        "gemm.heads": {"weight_format": dtype, "weight_layout": "rows"},
        "moe.experts": {"weight_formats": (dtype, dtype), "weight_layouts": ("rows", "rows")},
    }
    for name, traits in calls.items():
        found = explain(name, platform=HOPPER, device="cuda", dtype=dtype, batch_invariant=True, **traits)
        chosen = next(verdict.name for verdict in found if verdict.verdict == "chosen")
        assert spec.specs_of(name)[chosen].batch_invariant
