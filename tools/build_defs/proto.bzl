# SPDX-License-Identifier: MIT
"""Python gRPC stubs by the locked grpcio-tools wheel: the same rule with or without a package registry.

The .proto files, wherever they lie below the BUILD file, become the modules of one Python package:
`from PACKAGE import x_pb2, x_pb2_grpc`. They import one another by file name.
"""

load("@rules_python//python:py_info.bzl", "PyInfo")

def _impl(ctx):
    outs = [ctx.actions.declare_file(ctx.attr.package + "/__init__.py")]
    for src in ctx.files.srcs:
        stem = ctx.attr.package + "/" + src.basename[:-len(".proto")]
        outs += [ctx.actions.declare_file(stem + suffix) for suffix in ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")]
    args = ctx.actions.args()
    args.add("--out", outs[0].dirname)
    args.add_all(ctx.files.srcs)
    ctx.actions.run(
        executable = ctx.executable._gen,
        inputs = ctx.files.srcs,
        outputs = outs,
        arguments = [args],
        mnemonic = "PyGrpc",
        progress_message = "Generating gRPC stubs %{label}",
    )
    runtime = [ctx.attr._grpc, ctx.attr._protobuf]
    infos = [d[PyInfo] for d in runtime]
    return [
        DefaultInfo(
            files = depset(outs),
            runfiles = ctx.runfiles(files = outs).merge_all([d[DefaultInfo].default_runfiles for d in runtime]),
        ),
        PyInfo(
            transitive_sources = depset(
                [o for o in outs if o.extension == "py"],
                transitive = [i.transitive_sources for i in infos],
            ),
            imports = depset(
                ["/".join([p for p in (ctx.workspace_name, ctx.label.package) if p])],
                transitive = [i.imports for i in infos],
            ),
        ),
    ]

py_grpc_package = rule(
    implementation = _impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".proto"], mandatory = True),
        "package": attr.string(mandatory = True, doc = "name of the Python package, made beside the BUILD file"),
        "_gen": attr.label(default = "//tools/build_defs:gen_grpc", executable = True, cfg = "exec"),
        "_grpc": attr.label(default = "@wheels//grpcio"),
        "_protobuf": attr.label(default = "@wheels//protobuf"),
    },
    provides = [PyInfo],
)
