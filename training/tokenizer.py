"""Train the byte-level BPE tokenizer and save it in the form `AutoTokenizer` loads.

The pre-tokenizer keeps an identifier's spelling independent of what stands before it where
that is cheap: digits stand alone, `snake_case` splits before each underscore, and runs of
two or more spaces (indentation) never merge with the word that follows.  A prompt that ends
after a newline or after indentation therefore tokenizes the way the training text did.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.edits import make_edit, user_content

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, SYSTEM, USER, ASSISTANT]
MAX_LENGTH = 2048

SPLIT = r"\n+|[ ]{2,}|__[A-Za-z]+__|[ ]?[A-Za-z]+|_[A-Za-z]+|[0-9]|_+|[ ]?[^\sA-Za-z0-9_]+|\s"

# Every turn ends with the same token that ends a plain document, so a server needs to know
# one stop token only.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    # Functions are told of as models that write <tool_call> are; without any, nothing is said of them.
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{{ 'Functions:' }}{% for tool in tools %}{{ '\n' + (tool['function'] | tojson) }}{% endfor %}"
    '{{ \'\nTo call one:\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\' }}'
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts and wrap it for transformers."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    # The usual convention: plain encoding puts the document start first, a chat template that
    # writes it itself is encoded without special tokens.
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    wrap: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return wrapped


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone, without a document start."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train on a corpus folder's train.jsonl and save the tokenizer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    with open(args.corpus / "train.jsonl") as handle:
        texts = [json.loads(line)["text"] for line in handle]
    rng = random.Random(0)
    texts = rng.sample(texts, min(len(texts), 20_000))
    texts += [user_content(rng, make_edit(rng, text)) for text in texts[: len(texts) // 3]]
    tokenizer = train_tokenizer(texts, args.vocab)
    save_tokenizer(tokenizer, args.out)
    sample = texts[:: max(1, len(texts) // 500)]
    tokens = sum(len(encode(tokenizer, t)) for t in sample)
    print(f"vocab {len(tokenizer)}, {sum(map(len, sample)) / tokens:.2f} characters per token")


if __name__ == "__main__":
    main()
