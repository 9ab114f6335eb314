# SPDX-License-Identifier: MIT
load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library")

_DEPS = [Label("@wheels_cpu_pybind11//:pybind11_headers"), Label("@rules_python//python/cc:current_py_cc_headers")]
_COPTS = ["-fexceptions"]

def pybind_extension(name, copts = [], linkopts = [], deps = [], tags = [], **kwargs):
    cc_binary(
        name = name + ".so",
        copts = copts + _COPTS + ["-fvisibility=hidden"],
        linkopts = linkopts + ["-Wl,-Bsymbolic"],
        linkshared = True,
        deps = deps + _DEPS,
        tags = tags,
        **kwargs
    )
    native.alias(name = name, actual = name + ".so", visibility = kwargs.get("visibility"))

def pybind_library(name, copts = [], deps = [], **kwargs):
    cc_library(name = name, copts = copts + _COPTS, deps = deps + _DEPS, **kwargs)
