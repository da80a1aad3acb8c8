"""`python -m kernels`: which backend would run here; `python -m kernels aot`: compile every kernel for every target."""

from __future__ import annotations

import argparse
import sys

from kernels.backend import UnknownBackend, choose_backend


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence on standard error when something cannot be used here."""
    parser = argparse.ArgumentParser(prog="python -m kernels", description="The kernels of the paged KV cache.")
    parser.add_argument("command", nargs="?", default="backend", choices=["backend", "aot"])
    parser.add_argument("--backend", default=None, help="ask for a backend instead of letting it be chosen")
    parser.add_argument("--device", default="cpu", help="device of the tensors: cpu, cuda")
    parser.add_argument("--every", action="store_true", help="aot: attention in every default configuration, which takes many minutes")
    options = parser.parse_args(arguments)
    try:
        if options.command == "backend":
            print(choose_backend(options.backend, options.device).reason)
            return 0
        try:
            from kernels import aot
        except ImportError:
            raise UnknownBackend("Compiling needs Triton, which is not installed here.") from None
        for line in aot.table(options.every):
            print(line, flush=True)
    except UnknownBackend as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
