# SPDX-License-Identifier: MIT
"""Debian packages for image layers, pinned by version and SHA-256 in a lock (see fetch.py)."""

def _debs_impl(rctx):
    python = rctx.which("python3.11") or rctx.which("python3")
    lock = rctx.path(rctx.attr.lock)
    result = rctx.execute([python, rctx.path(Label("//tools/debian:fetch.py")), lock, "."], timeout = 1200)
    if result.return_code:
        fail(result.stderr)
    names = [p["package"] + ".deb" for p in json.decode(rctx.read(lock))["packages"]]
    rctx.file("BUILD.bazel", """
filegroup(
    name = "debs",
    srcs = %r,
    visibility = ["//visibility:public"],
)
""" % names)

_debs = repository_rule(
    implementation = _debs_impl,
    attrs = {"lock": attr.label(mandatory = True)},
    environ = ["TOKENSPEED_DEBS", "TOKENSPEED_DEBS_RETIRED"],
)

def _impl(mctx):
    for module in mctx.modules:
        for tag in module.tags.packages:
            _debs(name = tag.name, lock = tag.lock)

debian = module_extension(
    implementation = _impl,
    tag_classes = {"packages": tag_class(attrs = {
        "name": attr.string(mandatory = True),
        "lock": attr.label(mandatory = True),
    })},
)
