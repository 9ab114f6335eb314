# SPDX-License-Identifier: MIT
"""Air-gapped stand-in for rules_python's `pip` extension.

`pip.parse` reads the hash-pinned lock and makes one lazily fetched repository a distribution, each filled by
`pip install --require-hashes --no-deps`, so the machine's own pip configuration (mirror, wheel folder) is honoured.
A distribution's site-packages is one directory to Bazel, not thousands of files: trees of runfiles stay small."""

def _norm(name):
    return name.lower().replace("-", "_").replace(".", "_")

def _parse(text):
    """{normalised name: whole requirement with its hashes} and the options that stand on their own lines."""
    requirements = {}
    options = []
    logical = ""
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("#"):
            continue
        line = line.split(" #")[0].strip()
        if line.endswith("\\"):
            logical += line[:-1] + " "
            continue
        logical += line
        if logical.startswith("-"):
            options.append(logical)
        elif logical:
            requirements[_norm(logical.split("==")[0].split("[")[0].strip())] = logical
        logical = ""
    return requirements, options

def _wheel_impl(rctx):
    here = rctx.path(Label("@host_python//:BUILD.bazel")).dirname
    python = rctx.read(here.get_child("defs.bzl")).split('"')[1]
    rctx.report_progress("installing " + rctx.attr.requirement.split(" ")[0])
    result = rctx.execute(
        [python, rctx.path(Label("//python/private:install_wheel.py")), json.encode({
            "requirement": rctx.attr.requirement,
            "options": rctx.attr.options,
            "name": rctx.attr.package,
            "known": rctx.attr.known,
            "hub": rctx.attr.hub,
            "pip": str(rctx.path(Label("@@//tools/debian:run_pip.py"))),
        })],
        timeout = 3600,
    )
    if result.return_code:
        fail("pip could not install %s:\n%s%s" % (rctx.attr.requirement.split(" ")[0], result.stdout, result.stderr))

_wheel = repository_rule(
    implementation = _wheel_impl,
    attrs = {
        "requirement": attr.string(mandatory = True),
        "options": attr.string_list(),
        "package": attr.string(mandatory = True),
        "known": attr.string_list(),
        "hub": attr.string(mandatory = True),
    },
)

def _hub_impl(rctx):
    rctx.file("BUILD.bazel", "")
    for package in rctx.attr.packages:
        actual = "@%s_%s//" % (rctx.attr.hub, package)
        rctx.file(package + "/BUILD.bazel", """package(default_visibility = ["//visibility:public"])
alias(name = "{p}", actual = "{a}:pkg")
alias(name = "pkg", actual = "{a}:pkg")
alias(name = "data", actual = "{a}:data")
""".format(p = package, a = actual))

_hub = repository_rule(
    implementation = _hub_impl,
    attrs = {"hub": attr.string(), "packages": attr.string_list()},
)

def _impl(mctx):
    for module in mctx.modules:
        for tag in module.tags.parse:
            requirements, options = _parse(mctx.read(tag.requirements_lock))
            for package, line in requirements.items():
                _wheel(
                    name = "%s_%s" % (tag.hub_name, package),
                    hub = tag.hub_name,
                    known = requirements.keys(),
                    options = options,
                    package = package,
                    requirement = line,
                )
            _hub(name = tag.hub_name, hub = tag.hub_name, packages = requirements.keys())

_parse_tag = tag_class(attrs = {
    "hub_name": attr.string(mandatory = True),
    "python_version": attr.string(mandatory = True),
    "requirements_lock": attr.label(mandatory = True),
    "extra_pip_args": attr.string_list(),
    "download_only": attr.bool(),
})
_default_tag = tag_class(attrs = {"default_hub": attr.string()})

pip = module_extension(implementation = _impl, tag_classes = {"parse": _parse_tag, "default": _default_tag})
