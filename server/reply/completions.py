"""``/v1/completions``: OpenAI's shape of text, chunks and logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.events import TokenLogprobs
from server.plan import RequestPlan
from server.reply.choices import ChoiceDelta
from server.reply.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from server.reply.token_texts import TokenTexts
from server.reply.writers import extras, says_nothing


class CompletionWriter:
    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        self.plan = plan
        self._texts = texts
        self._model_name = model_name
        self._fingerprint = fingerprint

    def chunk(self, delta: ChoiceDelta) -> Completion | None:
        if says_nothing(self.plan, delta):
            return None
        return self._completion([self._choice(delta)])

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Completion:
        return self._completion([self._choice(choice) for choice in choices], usage)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> Completion:
        completion = Completion(
            id=f"cmpl-{self.plan.request_id}",
            object="text_completion",
            created=self.plan.created,
            model=self._model_name,
            system_fingerprint=self._fingerprint,
            seed=self.plan.seed,
            choices=choices,
        )
        if usage is not None:
            completion.usage = usage
        return completion

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        prompt = self.plan.prompt_of(delta.index)
        echoes = self.plan.echo and delta.first
        return CompletionChoice(
            index=delta.index,
            text=(prompt.text if echoes else "") + delta.text,
            logprobs=self._logprobs(delta),
            finish_reason=None if delta.end is None else delta.end.reason,
            **extras(self.plan, delta),
        )

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs | None:
        if self.plan.num_logprobs is None:
            return None
        block = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if delta.prompt_logprobs is not None:
            self._add_prompt(block, delta)
        start = len(self.plan.prompt_of(delta.index).text) if self.plan.echo else 0
        for token in delta.tokens:
            self._add(block, token.token_id, token.logprobs, start + token.start)
        return block

    def _add_prompt(self, block: CompletionLogprobs, delta: ChoiceDelta) -> None:
        """The prompt's tokens; the first has no logprob, since nothing comes before it."""
        assert delta.prompt_logprobs is not None
        prompt = self.plan.prompt_of(delta.index)
        pieces = self._texts.pieces(prompt.token_ids)
        offset = 0
        for token_id, piece, logprobs in zip(
            prompt.token_ids, pieces, delta.prompt_logprobs, strict=True
        ):
            self._add(block, token_id, logprobs, offset)
            if token_id in self._texts.special_ids:
                # The tokenizer may have added it, and then it is not in the text.
                name = self._texts.text(token_id)
                offset += len(name) if prompt.text.startswith(name, offset) else 0
            offset += len(piece)

    def _add(
        self,
        block: CompletionLogprobs,
        token_id: int,
        logprobs: TokenLogprobs | None,
        offset: int,
    ) -> None:
        block.tokens.append(self._texts.text(token_id))
        block.text_offset.append(offset)
        block.token_logprobs.append(None if logprobs is None else logprobs.logprob)
        if logprobs is None or not self.plan.num_logprobs:
            block.top_logprobs.append(None)
            return
        top = {self._texts.text(top_id): logprob for top_id, logprob in logprobs.top}
        # OpenAI lists the chosen token too, so there may be one entry more than was asked for.
        top.setdefault(self._texts.text(token_id), logprobs.logprob)
        block.top_logprobs.append(top)
