"""OpenAI's ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``, with vLLM's fields."""
