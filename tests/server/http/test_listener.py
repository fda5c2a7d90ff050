from __future__ import annotations

import socket
from typing import Any

import pytest

from engine.config import EngineConfig
from server.http.listener import bind, open_to_successors, url
from server.serve import serve
from server.settings import Settings


def test_the_address_is_told_whatever_the_family() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_dualstack_ipv6():
        with bind("::1", 0) as listener:
            assert url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


@pytest.mark.parametrize("engine_process", [True, False])
@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_told_in_a_line_before_anything_is_loaded(
    engine_process: bool, listens: bool
) -> None:
    with bind("127.0.0.1", 0) as other:
        # Otherwise it is a server that still loads its model.
        if listens:
            open_to_successors(other)
            other.listen()
        port = other.getsockname()[1]
        settings: Any = {"port": port, "engine_process": engine_process}
        # A model that is not there would be refused otherwise.
        config = EngineConfig(model="/nowhere/at/all")
        with pytest.raises(
            OSError, match=rf"^cannot listen on 127\.0\.0\.1, port {port}: "
        ) as error:
            serve(Settings(**settings), config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_served_without_a_key_only_if_that_is_said(host: str) -> None:
    said = "other machines reach .* api_key or api_keys_file, or allow_open"
    config = EngineConfig(model="bundled")
    with pytest.raises(ValueError, match=said):
        serve(Settings(host=host, port=0), config)
    for more in ({"allow_open": True}, {"api_key": "k"}):
        # Gets as far as the next refusal.
        with pytest.raises(ValueError, match="api_workers"):
            serve(Settings(host=host, port=0, engine_process=False, api_workers=2, **more), config)


def test_a_host_that_is_not_ours_is_told_in_a_line() -> None:
    with pytest.raises(OSError, match=r"^cannot listen on 192\.0\.2\.1, port 0: "):
        bind("192.0.2.1", 0)
