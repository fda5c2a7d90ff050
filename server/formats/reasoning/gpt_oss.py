"""Channels: ``<|channel|>analysis<|message|>...<|end|>`` is reasoning, whatever is said in others is not.
Written by gpt-oss, which may change between them several times."""

from __future__ import annotations

from regex import compile, search

from server.formats.format import ReasoningFormat, Splitter

# The prompt ends within the first header.
_HEADER = compile(
    r"\s{0,64}(?:<\|start\|>assistant)?(?P<header>[^<]{0,128}<\|channel\|>[^<]{0,128}"
    r"(?:<\|constrain\|>[^<]{0,64})?)<\|message\|>"
)
_END = compile(r"<\|(?:end|return)\|>|(?=<\|start\|>)")


class ChannelSplitter(Splitter):
    """Splits the text of one choice. A call comes out as content, its header in one spelling."""

    def __init__(self, is_open: bool) -> None:
        super().__init__(self._message if is_open else self._header)
        self._is_reasoning = is_open
        self._wrote = {True: False, False: False}
        self._is_next = False
        if is_open:
            self._starts.append(0)

    def _header(self, final: bool) -> bool:
        found = _HEADER.match(self._buffer, partial=not final)
        if not self._buffer or (found and found.partial):
            return False
        self._state, self._is_next = self._message, True
        self._is_reasoning = False
        if found:
            header = found["header"]
            called = search(r"\bto=(functions\.[\w.-]{1,128})", header)
            self._is_reasoning = "<|channel|>analysis" in header and not called
            if called:
                self._write(f"<|channel|>commentary to={called[1]}<|message|>")
            if self._is_reasoning:
                self._starts.append(self._at)
            self._take(found.end())
        else:
            # What begins like a header and is none must not be looked at once more.
            self._write(self._take(1))
        return True

    def _message(self, final: bool) -> bool:
        text, found = self._until(_END, final)
        self._write(text)
        if found is None:
            return False
        if self._is_reasoning:
            self._ends.append(self._at)
        self._state = self._header
        return True

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._is_next and self._wrote[self._is_reasoning]:
            text = "\n" + text
        self._is_next, self._wrote[self._is_reasoning] = False, True
        self._settled.append((text, "") if self._is_reasoning else ("", text))


FORMAT = ReasoningFormat(
    name="gpt_oss",
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    assumed=False,
    writes=lambda template: "<|channel|>" in template and "analysis" in template,
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>"),
    answer="<|start|>assistant<|channel|>final<|message|>",
    splitter=ChannelSplitter,
)
