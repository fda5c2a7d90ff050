"""How many draft nodes each request verifies in a step. One file per policy; DESIGN section 7."""

from engine.speculation.gamma.controller import GammaController
from engine.speculation.gamma.policy import DraftCandidate, Grant, Reason

__all__ = ["DraftCandidate", "GammaController", "Grant", "Reason"]
