# SPDX-License-Identifier: MIT
"""`python3 -m tokenspeed.rpc.grpc --model MODEL --host HOST --port PORT [engine flags]`: an engine behind gRPC."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenspeed.rpc.grpc.serve.command import main as serve


def main(argv: Sequence[str] | None = None) -> int:
    return serve(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
