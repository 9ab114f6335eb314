# SPDX-License-Identifier: MIT
"""googletest's sources as Debian packages them, pinned by tools/locks/googletest.json."""

_BUILD = """load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest",
    srcs = ["googletest/src/gtest-all.cc", "googlemock/src/gmock-all.cc"],
    hdrs = glob(["googletest/include/**/*.h", "googlemock/include/**/*.h"]),
    includes = ["googletest/include", "googlemock/include", "googletest", "googlemock"],
    linkopts = ["-pthread"],
    textual_hdrs = glob(
        ["googletest/src/*.cc", "googletest/src/*.h", "googlemock/src/*.cc"],
        exclude = ["**/*-all.cc", "**/*_main.cc"],
    ),
)

cc_library(
    name = "gtest_main",
    srcs = ["googlemock/src/gmock_main.cc"],
    deps = [":gtest"],
)
"""

def _repo(rctx):
    python = rctx.which("python3.11") or rctx.which("python3")
    result = rctx.execute([python, rctx.path(Label("@@//tools/debian:fetch.py")), rctx.path(Label("@@//tools/locks:googletest.json")), "deb", "--unpack"])
    if result.return_code:
        fail("googletest's sources could not be fetched:\n" + result.stderr)
    for part in ("googletest", "googlemock"):
        rctx.symlink("deb/usr/src/googletest/" + part, part)
    rctx.file("BUILD.bazel", _BUILD)

_googletest = repository_rule(implementation = _repo)

def _impl(_mctx):
    _googletest(name = "googletest_src")

googletest_src = module_extension(implementation = _impl)
