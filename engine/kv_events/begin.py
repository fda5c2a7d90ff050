"""Whether KV events are sent. Knows nothing of the extra's packages, which may be missing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.kv_events.announcer import Announcer
    from engine.kv_events.publisher import Publisher


def check_kv_events(config: EngineConfig) -> bool:
    """Whether any are sent. Raises ValueError where they should be and the extra is missing."""
    if config.kv_events_endpoint is None:
        return False
    for name in ("zmq", "msgspec"):
        try:
            import_module(name)
        except ImportError as error:
            needs = "ZeroMQ and msgspec: pip install -e '.[kv-events]'"
            raise ValueError(f"kv_events_endpoint: sending KV events needs {needs}") from error
    return True


class KvEvents:
    """Tells of an engine's prefix cache: ``announcer`` listens to the pool, ``publisher`` sends.
    All of it belongs to the thread that steps the engine."""

    def __init__(self, announcer: Announcer, publisher: Publisher) -> None:
        self.announcer = announcer
        self._publisher = publisher
        self._seen = (0, 0)
        self.start = publisher.start
        self.stop = publisher.stop
        self.flush = announcer.flush

    def take_counts(self) -> tuple[int, int]:
        """Events sent, and dropped, since the last call."""
        before = self._seen
        self._seen = (self._publisher.num_sent, self._publisher.num_dropped)
        return self._seen[0] - before[0], self._seen[1] - before[1]


def begin_kv_events(config: EngineConfig) -> KvEvents | None:
    """None: none are sent. Raises as ``check_kv_events``, and ValueError where a socket cannot be
    opened."""
    if not check_kv_events(config):
        return None
    assert config.kv_events_endpoint is not None
    assert config.kv_events_topic is not None
    # Imported late: only here is it known that they can be.
    from engine.kv_events.announcer import Announcer
    from engine.kv_events.publisher import Publisher

    publisher = Publisher(
        config.kv_events_endpoint, config.kv_events_replay_endpoint, config.kv_events_topic
    )
    announcer = Announcer(config.block_size, config.kv_events_salted, publisher.send)
    return KvEvents(announcer, publisher)
