# SPDX-License-Identifier: MIT
"""A CUDA toolkit assembled from NVIDIA's hash-pinned wheels (the same files on every machine)."""

def _toolkit_impl(rctx):
    py = None
    for c in [rctx.os.environ.get("TOKENSPEED_PYTHON", ""), "python3.11", "python3"]:
        py = py or ((rctx.path(c) if c.startswith("/") else rctx.which(c)) if c else None)
    if not py:
        fail("python3 is needed to install the CUDA wheels")
    r = rctx.execute([
        py,
        rctx.path(Label("//tools/debian:run_pip.py")),
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
        "--target",
        "site",
        "-r",
        rctx.path(rctx.attr.lock),
    ], timeout = 3600)
    if r.return_code:
        fail("pip could not install the CUDA wheels:\n" + r.stdout + r.stderr)
    rctx.execute(["sh", "-c", "mv site/nvidia/cu13 cuda && rm -rf site && rm -rf cuda/lib/*.a && find . -name __pycache__ -prune -exec rm -rf {} +"])
    rctx.file("BUILD.bazel", """
package(default_visibility = ["//visibility:public"])
exports_files(["cuda/bin/nvcc"])
filegroup(name = "toolkit", srcs = glob(["cuda/bin/**", "cuda/nvvm/**", "cuda/include/**"]))
""")

cuda_toolkit = repository_rule(
    implementation = _toolkit_impl,
    attrs = {"lock": attr.label(mandatory = True)},
)

def _impl(mctx):
    for m in mctx.modules:
        for t in m.tags.toolkit:
            cuda_toolkit(name = t.name, lock = t.requirements_lock)

_toolkit = tag_class(attrs = {"name": attr.string(default = "cuda_toolkit"), "requirements_lock": attr.label(mandatory = True)})

cuda = module_extension(implementation = _impl, tag_classes = {"toolkit": _toolkit})
