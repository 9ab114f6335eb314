# SPDX-License-Identifier: MIT
"""Python libraries, programs and tests whose imports resolve as in the source tree.

`ts_py_library` gives a library the import root of its folder (python/, kernels/, cc/bindings/, protos/, or the
repository for tests/ and tools/). `ts_pytest` runs pytest on its sources, with the project's pyproject.toml.
`ts_py_binary` is a program; both set TOKENSPEED_EMBEDDED_MODEL when the embedded model is among their data.
"""

load("@rules_python//python:py_binary.bzl", "py_binary")
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")

_ROOTS = ["cc/bindings", "kernels", "protos", "python"]
_MODEL = "@embedded_model//:gguf"
_MODEL_ENV = {"TOKENSPEED_EMBEDDED_MODEL": "$(rootpath %s)" % _MODEL}

def _import_root():
    """The way up from this package to the folder that its modules are imported from."""
    package = native.package_name()
    for root in _ROOTS:
        if package == root:
            return "."
        if package.startswith(root + "/"):
            return "/".join([".."] * package[len(root):].count("/"))
    return "/".join([".."] * (package.count("/") + 1)) if package else "."

def ts_py_library(name, srcs = [], deps = [], data = [], imports = [], **kwargs):
    py_library(
        name = name,
        srcs = srcs,
        data = data,
        imports = [_import_root()] + imports,
        deps = deps,
        **kwargs
    )

def ts_py_binary(name, srcs, main, deps = [], data = [], env = {}, **kwargs):
    py_binary(
        name = name,
        srcs = srcs,
        data = data,
        env = (_MODEL_ENV if _MODEL in data else {}) | env,
        imports = [_import_root()],
        main = main,
        deps = deps,
        **kwargs
    )

def ts_pytest(name, srcs, deps = [], data = [], env = {}, args = [], **kwargs):
    """One test target for the *_test.py among `srcs`; other sources (conftest.py, helpers) come along."""
    runner = Label("//tools/build_defs:pytest_main.py")
    tests = [s for s in srcs if s.endswith("_test.py")]
    if not tests:
        fail("ts_pytest %s: no *_test.py in srcs" % name)
    py_test(
        name = name,
        srcs = srcs + [runner],
        args = ["$(rootpath %s)" % t for t in tests] + args,
        data = data + [Label("//:pyproject.toml")],
        env = (_MODEL_ENV if _MODEL in data else {}) | env,
        imports = [_import_root()],
        main = runner,
        deps = deps + ["@wheels//pytest"],
        **kwargs
    )
