"""Puts an engine together: the one place where its parts meet and its sizes are decided.

The order is that of ``assembly``: ``target`` loads and quantizes the model, ``sizes`` says how much of it
fits into memory, ``drafters`` loads what drafts for it, ``core`` measures and puts a core around it.
"""

from engine.build.assembly import build_engine as build_engine
from engine.build.assembly import build_engine_for as build_engine_for
from engine.build.assembly import follow_engine as follow_engine
from engine.build.target import with_fastest_weights as with_fastest_weights
