"""Options of Ollama's requests; requests themselves are told by the tests of its endpoints."""

from __future__ import annotations

from server.apis.ollama.request import OllamaOptions
from server.request.chat import Chat


def test_every_option_is_a_field_of_chats() -> None:
    said = OllamaOptions().for_request({}).keys()
    assert set(OllamaOptions.model_fields) - said == {"num_predict", "repeat_penalty"}
    assert said <= {*Chat.model_fields}
