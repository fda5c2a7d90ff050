"""``slipstream complete``: one prompt, continued."""

from __future__ import annotations

from argparse import Namespace

from slipstream.client.display import choose_screen
from slipstream.client.flags import request_fields
from slipstream.client.session import find_service, finish, new_reply, read_text, request_reply

INTERRUPTED = 130


def run(arguments: Namespace) -> int:
    """Returns the exit status. Raises ClientError and FlagError."""
    fields = {**request_fields(arguments), "prompt": read_text(arguments.prompt)}
    screen = choose_screen(arguments)
    with screen.waiting("the server"):
        service = find_service(arguments)
    body = service.body(fields)
    reply = new_reply(service)
    try:
        request_reply(arguments, "/v1/completions", body, reply, screen)
    except KeyboardInterrupt:
        finish(reply, screen, arguments.json)
        return INTERRUPTED
    finish(reply, screen, arguments.json)
    return 0
