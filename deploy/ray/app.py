"""The application for Ray Serve, which serve.yaml beside this configures.

An ingress (``gateway``) in front of replicas of the server (``engine``), each with an engine's process.
"""

from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Message

from deploy.ray.exchange import Forwarded, ReplicaLostError, Whole, too_many_waiting
from deploy.ray.gateway import Gateway
from deploy.ray.replica import Replica
from deploy.ray.router import AffinityRouter
from deploy.ray.settings import Arguments, read_settings

# An answer to a question for all replicas that takes longer counts as none.
_ASK_SECONDS = 10.0
_GONE = (RayActorError, TaskCancelledError, RequestCancelledError, DeploymentUnavailableError)


class ServeReplicas:
    """The replicas that Serve runs, behind a handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def answer(self, request: Forwarded) -> AsyncGenerator[str | list[Message], None]:
        found: Any = self._handle.options(stream=True).answer.remote(request)
        try:
            async for messages in found:
                yield messages
        except BackPressureError as error:
            raise too_many_waiting() from error
        except _GONE as error:
            raise ReplicaLostError from error
        finally:
            found.cancel()

    async def ask_all(self, request: Forwarded) -> list[Whole]:
        asked = self._handle.broadcast("answer_whole", request)
        try:
            found = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return [each for each in found if isinstance(each, Whole)]

    async def max_body_bytes(self) -> int:
        found: int = await self._handle.max_body_bytes.remote()
        return found


engine = serve.deployment(
    Replica,
    name="engine",
    request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
)


def build(arguments: Arguments) -> serve.Application:
    """The application. Raises ValueError where the arguments or settings cannot be."""
    read_settings(arguments.settings).engine_config()
    num_characters = arguments.prefix_characters

    def ingress() -> Starlette:
        own = serve.get_replica_context()
        replicas = ServeReplicas(serve.get_deployment_handle("engine", own.app_name))
        return Gateway(replicas, num_characters, own.replica_id.unique_id).app()

    gateway = serve.deployment(serve.ingress(ingress)(), name="gateway")
    return gateway.bind(engine.bind(arguments.settings))
