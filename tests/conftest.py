"""The lanes of hypothesis: pinned examples where tests must pass, fresh ones where faults are sought."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run and machine. A busy machine is no fault, so that there is no deadline.
settings.register_profile("pinned", derandomize=True, deadline=None, max_examples=100)
# `scripts/test --fuzz`; worlds.lanes.examples multiplies what tests ask for alike. What is left out here,
# hypothesis takes from where it runs: with CI set, its examples would be the same ones every time.
settings.register_profile(
    "fuzz", derandomize=False, deadline=None, max_examples=1000, print_blob=True
)
# `--hypothesis-profile` comes later and wins.
settings.load_profile("pinned")
