"""The lanes of hypothesis: pinned examples where tests must pass, fresh ones where faults are sought. And
what has to be said before a library is imported."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# Triton reads this once, when it is first imported, by whomever: where there is no GPU, its programs
# run under its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every run and machine. A busy machine is no fault, so that there is no deadline.
settings.register_profile("pinned", derandomize=True, deadline=None, max_examples=100)
# `scripts/test --fuzz`; worlds.lanes.examples multiplies what tests ask for alike. What is left out here,
# hypothesis takes from where it runs: with CI set, its examples would be the same ones every time.
settings.register_profile(
    "fuzz", derandomize=False, deadline=None, max_examples=1000, print_blob=True
)
# `--hypothesis-profile` comes later and wins.
settings.load_profile("pinned")
