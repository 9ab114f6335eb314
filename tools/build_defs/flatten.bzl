# SPDX-License-Identifier: MIT
"""Where the files of a Python program go when its many import roots become two: its own code, and installed packages."""

_ROOTS = ["cc/bindings/", "kernels/", "protos/", "python/"]

def own_path(file):
    """The file's path below our own import root, or None: python/tokenspeed/x.py is tokenspeed/x.py."""
    for root in _ROOTS:
        if file.short_path.startswith(root):
            return file.short_path[len(root):]
    return None

def installed_path(file):
    """The file's path below site-packages ("" for the folder itself), or None when it is in no package."""
    parts = file.short_path.split("/")
    if len(parts) >= 3 and parts[0] == ".." and parts[2] == "site-packages":
        return "/".join(parts[3:])
    return None
