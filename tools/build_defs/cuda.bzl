# SPDX-License-Identifier: MIT
"""CUDA device code compiled by the pinned nvcc; no GPU and no system toolkit is needed."""

# What the kernels are built for: A100, H100/H200 (with its own instructions), B200.
ARCHS = ["sm_80", "sm_90a", "sm_100"]

def _impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + "." + ctx.attr.kind)
    args = ctx.actions.args()
    args.add("--" + ctx.attr.kind)
    args.add_all(["-std=c++17", "-O3", "-I."])
    args.add_all(ctx.attr.copts)
    for arch in ctx.attr.archs:
        args.add("-gencode=arch=compute_%s,code=%s" % (arch[3:], arch))
    args.add("-o", out)
    args.add(ctx.file.src)
    ctx.actions.run(
        executable = ctx.file._nvcc,
        inputs = depset([ctx.file.src] + ctx.files.hdrs, transitive = [depset(ctx.files._toolkit)]),
        outputs = [out],
        arguments = [args],
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "CudaCompile",
        progress_message = "Compiling CUDA %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

cuda_object = rule(
    implementation = _impl,
    doc = "One .cu file as NAME.fatbin (or .cubin, .ptx) beside its BUILD file; use it as `data`.",
    attrs = {
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "hdrs": attr.label_list(allow_files = True),
        "archs": attr.string_list(default = ARCHS),
        "copts": attr.string_list(),
        "kind": attr.string(default = "fatbin", values = ["fatbin", "cubin", "ptx"]),
        "_nvcc": attr.label(default = "@cuda_toolkit//:cuda/bin/nvcc", allow_single_file = True),
        "_toolkit": attr.label(default = "@cuda_toolkit//:toolkit"),
    },
)
