"""How families of models write what is more than text: tool calls and reasoning."""
