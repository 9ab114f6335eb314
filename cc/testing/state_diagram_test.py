# SPDX-License-Identifier: MIT
"""The diagram in docs/scheduler.md is what the compile-time table says.

After a change of the transitions: bazel run //cc/testing:state_diagram, and paste.
"""

import subprocess
from pathlib import Path


def test_the_documented_diagram_is_the_compiled_one() -> None:
    printed = subprocess.run(["cc/testing/state_diagram"], check=True, capture_output=True, text=True).stdout
    assert printed.count("-->") > 30
    assert f"```mermaid\n{printed}```" in Path("docs/scheduler.md").read_text()
