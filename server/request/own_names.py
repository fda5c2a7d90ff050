"""The names that a client's API has for the fields of the request that it is translated to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.errors import ApiError


@dataclass(frozen=True, slots=True)
class OwnNames:
    """``paths``: the client's, by those of the request that it is translated to. All that lies within a
    field keeps its place there, unless ``field.*`` has the client's path of it."""

    paths: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Returns the client's path of a field."""
        known, within = path, ""
        while known:
            if within and f"{known}.*" in self.paths:
                return self.paths[f"{known}.*"]
            if known in self.paths:
                return self.paths[known] + within
            known = known.rpartition(".")[0]
            within = path.removeprefix(known)
        return path

    @contextmanager
    def in_refusals(self) -> Iterator[None]:
        """Meanwhile refusals blame the client's own fields."""
        try:
            yield
        except ApiError as error:
            raise error.renamed(self.of) from error


SAME = OwnNames()
