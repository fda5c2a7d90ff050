"""How many draft nodes each request verifies in a step. One file per policy; DESIGN section 7."""

from engine.gamma.base import DraftCandidate, Grant, Reason
from engine.gamma.controller import GammaController

__all__ = ["DraftCandidate", "GammaController", "Grant", "Reason"]
