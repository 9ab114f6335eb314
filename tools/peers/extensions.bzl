# SPDX-License-Identifier: MIT
"""@peers//:site: the packages of tools/locks/peers.txt in one folder, which only the processes of peers import.

To Bazel it is one directory; a test gets it as data and its path in TOKENSPEED_PEERS.
"""

def _peers_impl(rctx):
    rctx.report_progress("installing the released peers (130 MB) with pip")
    python = rctx.which("python3.11") or rctx.which("python3")
    result = rctx.execute([
        python,
        rctx.path(Label("//tools/debian:run_pip.py")),
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-warn-script-location",
        "--target",
        "site-packages",
        "-r",
        rctx.path(Label("//tools/locks:peers.txt")),
    ], timeout = 3600)
    if result.return_code:
        fail("pip could not install the peers:\n" + result.stdout + result.stderr)
    rctx.file("BUILD.bazel", """
filegroup(
    name = "site",
    srcs = ["site-packages"],
    visibility = ["//visibility:public"],
)
""")

_peers = repository_rule(implementation = _peers_impl)

def _impl(_mctx):
    _peers(name = "peers")

peers = module_extension(implementation = _impl)
