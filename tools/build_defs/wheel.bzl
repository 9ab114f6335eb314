# SPDX-License-Identifier: MIT
"""An installable wheel of a Python library's own files, native parts included; the same bytes on every machine."""

load("@rules_python//python:py_info.bzl", "PyInfo")
load(":flatten.bzl", "own_path")

_PLATFORM_TAG = "cp311-cp311-linux_x86_64"

def _impl(ctx):
    files = ctx.attr.library[DefaultInfo].default_runfiles.files
    own = [file for file in files.to_list() if own_path(file)]
    lines = ["%s\t%s\n" % (own_path(file), file.path) for file in own]
    manifest = ctx.actions.declare_file(ctx.label.name + ".manifest")
    ctx.actions.write(manifest, "".join(lines))

    # The version stands in a source file, which Bazel does not read while it names outputs: a folder holds the wheel.
    out = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add("--manifest", manifest)
    args.add("--out", out.path)
    args.add("--distribution", ctx.attr.distribution)
    args.add("--version-file", ctx.attr.version_file)
    args.add("--tag", _PLATFORM_TAG)
    args.add("--summary", ctx.attr.summary)
    args.add("--license", ctx.file.license)
    args.add_all(ctx.attr.requires, format_each = "--requires=%s")
    args.add_all(["%s = %s" % item for item in ctx.attr.entry_points.items()], format_each = "--entry-point=%s")
    ctx.actions.run(
        executable = ctx.executable._tool,
        arguments = [args],
        inputs = own + [manifest, ctx.file.license],
        outputs = [out],
        mnemonic = "PyWheel",
        progress_message = "Packing wheel %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

py_wheel = rule(
    implementation = _impl,
    attrs = {
        "distribution": attr.string(mandatory = True),
        "entry_points": attr.string_dict(),
        "library": attr.label(mandatory = True, providers = [PyInfo]),
        "license": attr.label(mandatory = True, allow_single_file = True),
        "requires": attr.string_list(),
        "summary": attr.string(mandatory = True),
        "version_file": attr.string(mandatory = True, doc = "the file in the wheel that says __version__"),
        "_tool": attr.label(default = "//tools/build_defs:make_wheel", executable = True, cfg = "exec"),
    },
)
