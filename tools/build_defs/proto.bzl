# SPDX-License-Identifier: MIT
"""Python gRPC stubs by the locked grpcio-tools wheel: the same rule with or without a network."""

load("@rules_python//python:py_info.bzl", "PyInfo")

def _py_grpc_package_impl(ctx):
    folder = ctx.attr.package
    outs = [ctx.actions.declare_file(folder + "/__init__.py")]
    for src in ctx.files.srcs:
        stem = src.basename.removesuffix(".proto")
        outs += [ctx.actions.declare_file(folder + "/" + stem + suffix) for suffix in ["_pb2.py", "_pb2_grpc.py", "_pb2.pyi"]]
    args = ctx.actions.args()
    args.add("--proto-root", ctx.files.srcs[0].dirname)
    args.add("--package", ctx.attr.package)
    args.add("--out", outs[0].dirname.removesuffix("/" + folder))
    ctx.actions.run(
        executable = ctx.executable._gen,
        inputs = ctx.files.srcs,
        outputs = outs,
        arguments = [args],
        mnemonic = "PyGrpc",
        progress_message = "Generating gRPC stubs %{label}",
    )
    runtime = [ctx.attr._grpc, ctx.attr._protobuf]
    runfiles = ctx.runfiles(files = outs)
    for dep in runtime:
        runfiles = runfiles.merge(dep[DefaultInfo].default_runfiles)
    return [
        DefaultInfo(files = depset(outs), runfiles = runfiles),
        PyInfo(
            transitive_sources = depset(
                [out for out in outs if out.extension == "py"],
                transitive = [dep[PyInfo].transitive_sources for dep in runtime],
            ),
            imports = depset(
                [ctx.workspace_name + "/" + ctx.label.package],
                transitive = [dep[PyInfo].imports for dep in runtime],
            ),
        ),
    ]

py_grpc_package = rule(
    implementation = _py_grpc_package_impl,
    doc = "One Python package with the stubs of all .proto files of one folder. Imports: `from <package> import x_pb2`.",
    attrs = {
        "srcs": attr.label_list(allow_files = [".proto"], mandatory = True, doc = "all .proto files of one folder"),
        "package": attr.string(mandatory = True, doc = "name of the Python package"),
        "_gen": attr.label(default = "//tools/build_defs:gen_grpc", executable = True, cfg = "exec"),
        "_grpc": attr.label(default = "@wheels//grpcio"),
        "_protobuf": attr.label(default = "@wheels//protobuf"),
    },
    provides = [PyInfo],
)
