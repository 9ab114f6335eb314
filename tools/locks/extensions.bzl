# SPDX-License-Identifier: MIT
"""@wheels: one name for the packages of the lock that //tools/locks:device picks."""

def _names(text):
    """The normalised package names of a lock, extras left out."""
    names = {}
    for line in text.split("\n"):
        if line and line[0].isalnum() and "==" in line:
            names[line.split("==")[0].split("[")[0].strip().lower().replace("-", "_").replace(".", "_")] = True
    return names

def _hub_impl(rctx):
    cpu, cuda = [_names(rctx.read(lock)) for lock in (rctx.attr.cpu, rctx.attr.cuda)]
    rctx.file("BUILD.bazel", "")
    for name in sorted(cpu | cuda):
        choices = []
        if name in cuda:
            choices.append('"@@//tools/locks:is_cuda": "@wheels_cuda//%s"' % name)
        if name in cpu:
            choices.append('"//conditions:default": "@wheels_cpu//%s"' % name)
        rctx.file(name + "/BUILD.bazel", """alias(
    name = "%s",
    actual = select({%s}, no_match_error = "only in the CUDA lock: add --config=cuda"),
    visibility = ["//visibility:public"],
)
""" % (name, ", ".join(choices)))

_hub = repository_rule(
    implementation = _hub_impl,
    attrs = {"cpu": attr.label(mandatory = True), "cuda": attr.label(mandatory = True)},
)

def _impl(mctx):
    for module in mctx.modules:
        for tag in module.tags.hub:
            _hub(name = tag.name, cpu = tag.cpu, cuda = tag.cuda)

wheels = module_extension(
    implementation = _impl,
    tag_classes = {"hub": tag_class(attrs = {
        "name": attr.string(mandatory = True),
        "cpu": attr.label(mandatory = True),
        "cuda": attr.label(mandatory = True),
    })},
)
