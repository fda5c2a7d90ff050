"""``python -m slipstream.tools.simulate``."""

from __future__ import annotations

import sys

_EXTRA = ("httpx", "matplotlib", "rich", "simpy")


def _main() -> int:
    try:
        from slipstream.tools.simulate.command import main

        return main()
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(f"simulate: needs {error.name}: pip install -e '.[simulate]'\n")
        return 2


if __name__ == "__main__":
    sys.exit(_main())
