"""The whole API over a scripted engine, as a process of its own, for `scripts/fuzz-api`:

python -m worlds.fuzzed_server PORT KEYS_FILE ADMIN_KEY
"""

from __future__ import annotations

import asyncio
import sys

from server.app import build_app
from server.http.draining import DrainingServer
from server.http.listener import bind
from server.serve import http_config
from server.settings import Settings
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer


async def main(port: int, keys: str, admin_key: str) -> None:
    settings = Settings(api_keys_file=keys, admin_key=admin_key, max_request_seconds=60)
    app = build_app(ScriptedEngine(), byte_tokenizer(), settings)
    with bind("127.0.0.1", port) as listener:
        server = DrainingServer(http_config(app, settings), app.state.models.drain)
        await server.serve([listener])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
