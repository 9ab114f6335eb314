# SPDX-License-Identifier: MIT
"""Air-gapped stand-in for rules_python's `python` extension: the toolchain is an interpreter that is on the machine,
checked against the requested version. Headers that it comes without are Debian's, by //tools/debian."""

_BUILD = '''load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{exe}",
    python_version = "PY3",
    stub_shebang = "#!{exe}",
)
py_runtime_pair(name = "pair", py3_runtime = ":runtime")
toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = {includes},
)
'''

def _host_python_impl(rctx):
    version = rctx.attr.python_version
    exe = None
    for candidate in [rctx.os.environ.get("TOKENSPEED_PYTHON", ""), "python" + version, "python3"]:
        path = (rctx.path(candidate) if candidate.startswith("/") else rctx.which(candidate)) if candidate else None
        if not path:
            continue
        probe = "import sys,sysconfig;print('%d.%d' % sys.version_info[:2]);print(sys.executable);print(sysconfig.get_path('include'))"
        result = rctx.execute([path, "-c", probe])
        if result.return_code == 0 and result.stdout.split("\n")[0] == version:
            exe, include = result.stdout.split("\n")[1:3]
            break
    if not exe:
        fail("no Python %s on PATH (set TOKENSPEED_PYTHON to one)" % version)
    if rctx.path(include + "/Python.h").exists:
        rctx.symlink(include, "include")
        includes = ["include"]
    else:
        result = rctx.execute([exe, rctx.path(Label("@@//tools/debian:fetch.py")), rctx.path(Label("@@//tools/locks:python_headers.json")), "headers", "--unpack"])
        if result.return_code:
            fail("Python.h is not in %s, and Debian's could not be fetched:\n%s" % (include, result.stderr))
        rctx.symlink("headers/usr/include", "include")
        includes = ["include/python" + version, "include"]
    rctx.file("BUILD.bazel", _BUILD.format(exe = exe, includes = includes))
    rctx.file("defs.bzl", "PYTHON = %r\n" % exe)

host_python = repository_rule(
    implementation = _host_python_impl,
    attrs = {"python_version": attr.string(mandatory = True)},
    environ = ["PATH", "TOKENSPEED_PYTHON"],
    local = True,
)

def _impl(mctx):
    version = None
    for module in mctx.modules:
        for tag in module.tags.toolchain:
            if module.is_root or version == None:
                version = tag.python_version
    host_python(name = "host_python", python_version = version or "3.11")

_toolchain = tag_class(attrs = {
    "python_version": attr.string(mandatory = True),
    "is_default": attr.bool(default = False),
    "configure_coverage_tool": attr.bool(default = False),
    "ignore_root_user_error": attr.bool(default = True),
})
_defaults = tag_class(attrs = {"python_version": attr.string(), "python_version_env": attr.string()})

python = module_extension(implementation = _impl, tag_classes = {"toolchain": _toolchain, "defaults": _defaults})
