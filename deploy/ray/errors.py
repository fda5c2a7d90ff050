"""The errors between the ingress and a replica."""

from __future__ import annotations

from server.errors import ApiError

RETRY_SECONDS = 1


class ReplicaLostError(Exception):
    """The replica ended, or cannot go on, before its answer did."""


def replica_lost() -> ApiError:
    """Returns the error where nobody could answer, or an answer that has begun cannot go on."""
    return ApiError(
        503,
        "The replica that had this request is gone. Send it again: with the same seed it gets the same "
        "text.",
        code="replica_lost",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def too_many_waiting() -> ApiError:
    """Serve's own queue before the replicas is full."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(429, "Too many requests wait.", code="queue_full", headers=headers)


def not_adopted() -> ApiError:
    """Returns the error of a change that is for all replicas."""
    message = "Not all replicas took the change. Send it again."
    return ApiError(503, message, code="not_adopted")
