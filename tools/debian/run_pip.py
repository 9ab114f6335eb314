# SPDX-License-Identifier: MIT
"""pip for a Python that may have none: `run_pip.py ARGUMENTS...` runs `pip ARGUMENTS...` with this interpreter.

Debian's python3.11 comes without pip. Its archive has pip as a wheel (python3-pip-whl), which runs as it lies; it is
downloaded once, checked against tools/locks/pip.json, and kept in the user's cache folder.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
LOCK = HERE.parent / "locks" / "pip.json"


def pip_wheel() -> pathlib.Path:
    version = json.loads(LOCK.read_text())["packages"][0]["version"]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tokenspeed"
    kept = cache / f"pip-{version}"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            fetched = pathlib.Path(work, "pip")
            subprocess.run([sys.executable, str(HERE / "fetch.py"), str(LOCK), str(fetched), "--unpack"], check=True)
            try:
                fetched.rename(kept)
            except OSError:  # another process was first
                if not kept.exists():
                    raise
    return next((kept / "usr/share/python-wheels").glob("pip-*.whl"))


def environment() -> dict[str, str]:
    """What a process needs so that `python -m pip` works in it."""
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    if importlib.util.find_spec("pip") is None:
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(pip_wheel()), env.get("PYTHONPATH")) if p)
    return env


def main() -> int:
    return subprocess.run([sys.executable, "-m", "pip", *sys.argv[1:]], env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
