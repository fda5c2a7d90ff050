"""Prompts of many kinds for a model to answer, so that heads can be trained on what it writes itself.

Chats are put together from tasks and subjects, edits from code and operations on it, and the rest are
requests that the model thinks of itself: behind the opening of a user's turn a chat model writes one
(Xu et al., "Magpie", arXiv 2406.08464). What is held back for tests is made by the same rules from
subjects and files that are never trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.edits import base_text, make_edit, user_content
from training.samples import SYSTEM_PROMPTS

Messages = list[dict[str, str]]

_SUBJECTS = """
rain|volcanoes|the moon|tides|rainbows|earthquakes|photosynthesis|bees|whales|penguins|
dinosaurs|sharks|
owls|ants|spiders|cats|dogs|horses|bread|cheese|chocolate|coffee|tea|rice|honey|olive oil|
tomatoes|soup|
bicycles|trains|aeroplanes|ships|bridges|tunnels|lighthouses|windmills|clocks|mirrors|magnets|
batteries|
electric cars|solar panels|wind power|nuclear power|recycling|plastic|glass|paper|steel|
concrete|cotton|
wool|silk|leather|gold|salt|sugar|vitamins|sleep|dreams|memory|attention|habits|exercise|
running|yoga|
swimming|football|tennis|chess|juggling|dancing|singing|the piano|the guitar|the violin|jazz|
opera|poetry|
novels|short stories|fairy tales|myths|newspapers|libraries|museums|schools|universities|exams|
homework|
languages|grammar|spelling|handwriting|typing|calendars|holidays|birthdays|weddings|gardens|
roses|trees|
forests|deserts|islands|mountains|rivers|lakes|oceans|glaciers|the Arctic|the Amazon|Africa|
Japan|India|
Brazil|Canada|Egypt|ancient Rome|ancient Greece|the Middle Ages|the Renaissance|the printing press|
the industrial revolution|the telephone|radio|television|the internet|smartphones|
search engines|e-mail|
passwords|encryption|databases|spreadsheets|compilers|operating systems|computer networks|the cloud|
machine learning|neural networks|robots|drones|satellites|rockets|Mars|black holes|stars|
galaxies|gravity|
light|sound|heat|electricity|atoms|molecules|water|acids|fire|DNA|cells|viruses|bacteria|the heart|
the brain|the lungs|bones|teeth|skin|eyes|allergies|the common cold|first aid|money|banks|
inflation|taxes|
insurance|budgets|saving|investing|rent|jobs|interviews|meetings|teamwork|leadership|negotiation|
friendship|honesty|courage|patience|happiness|fear|anger|loneliness|democracy|elections|laws|courts|
human rights|maps|compasses|weather forecasts|statistics|probability|prime numbers|fractions|
algebra|
geometry|calculus|logic|riddles|board games|video games|photography|painting|sculpture|architecture|
furniture|knitting|pottery|cooking|baking|camping|hiking|fishing|sailing|surfing|skiing|
travelling light|
public transport|traffic lights|cities|villages|farms|markets|restaurants|hotels|airports|hospitals
"""
_TASKS = (
    "Explain {} to a child.",
    "Explain how {} works in a few sentences. If it is not a thing that works, say what it is.",
    "What is the history of {}?",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write a haiku about {}.",
    "List ten facts about {}.",
    "List five common misconceptions about {}.",
    "Give me five tips that have to do with {}.",
    "What are the advantages and disadvantages of {}?",
    "Write an essay of three paragraphs about {}.",
    "Write an introduction for a blog post about {}.",
    "Write a dialogue between two friends who talk about {}.",
    "Write a letter to a friend about {}.",
    "Write an e-mail to a colleague in which {} come up.",
    "Make a table with three columns about {}.",
    "Make a quiz with five questions and answers about {}.",
    "Make a plan for a lesson about {}.",
    "Write a speech about {}.",
    "Write an advertisement that has to do with {}.",
    "What would the world be like without {}?",
    "Why do people care about {}?",
    "Compare {} and {}.",
    "What do {} and {} have in common?",
    "Write a short story in which {} and {} play a part.",
    "How would you describe {} to someone who has never heard of it?",
    "What are three questions that an expert on {} would ask?",
    "Write a product description of something that has to do with {}.",
    "Summarise what everybody should know about {}.",
    "Give step-by-step instructions for a beginner: {}.",
    "Write a news report about {}.",
    "Write a JSON object with five properties that describes {}.",
    "Write a Markdown page about {} with headings and lists.",
    "Translate into French: I have always been interested in {}.",
    "Translate into Spanish: My friend knows a lot about {}.",
    "Think of a name for a company that has to do with {} and explain it.",
    "I am curious about {}. Where do I begin?",
    "Tell me something surprising about {}.",
    "Is there a connection between {} and {}? Explain your reasoning.",
    "Write a scene of a play that begins with a question about {}.",
)
_CODE_TASKS = """
reverses a string|checks whether a number is prime|computes the factorial of a number|
sorts a list of words|
merges two sorted lists|counts the words in a text|finds the largest number in a list|
removes duplicates|
reads a file line by line|writes a dictionary to a JSON file|parses a date|
validates an e-mail address|
computes the mean and the median|flattens a nested list|groups a list of pairs by key|counts vowels|
converts Celsius to Fahrenheit|finds common elements of two lists|computes the Fibonacci numbers|
implements binary search|implements a stack|implements a queue|implements a linked list|
rotates a matrix|
transposes a matrix|multiplies two matrices|generates a random password|finds all files in a folder|
downloads a web page|parses command line arguments|computes the greatest common divisor|
checks palindromes|
capitalises every word|finds the longest word|computes a moving average|implements a simple cache|
retries a call that fails|measures how long a call takes|logs messages to a file|
splits a list into chunks|
inverts a dictionary|merges dictionaries|counts how often each letter occurs|encodes run lengths|
implements bubble sort|implements quicksort|solves the towers of Hanoi|draws a triangle of stars|
simulates rolling dice|plays rock, paper, scissors|keeps a to-do list|models a bank account|
models a library
"""
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust", "SQL", "Bash")
_CODE_FORMS = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}, with comments.",
    "Show me how code in {language} {task}. Explain it line by line.",
    "Write {language} code that {task}, and a few tests.",
)
_CODE_QUESTIONS = (
    "Explain what this code does.",
    "Write a docstring for this code.",
    "Write unit tests for this code.",
    "Review this code and suggest improvements.",
    "Are there bugs in this code? List them.",
    "Rewrite this code so that it is easier to read.",
)
_TEXT_QUESTIONS = (
    "Summarise the following text in two sentences.",
    "Summarise the following text in three bullet points.",
    "Rewrite the following text in simpler words.",
    "Rewrite the following text and make it sound more formal.",
    "List the key terms of the following text.",
    "Write three questions that the following text answers.",
    "Continue the following text.",
    "Correct the grammar of the following text.",
    "What is the main point of the following text?",
)
_FOLLOW_UPS = (
    "Make it shorter.",
    "Can you give an example?",
    "Why?",
    "Say that again in simpler words.",
    "Now as a list, please.",
    "Tell me more.",
    "What should I do next?",
    "Thank you! Is there anything else I should know?",
    "Are you sure?",
    "Rewrite that for an expert.",
)
_HELD_OUT_SHARE = 0.06
OWN_SHARE = 0.35


def _words(text: str) -> list[str]:
    return [each for each in text.replace("\n", "").split("|") if each]


def _split(items: Sequence[str], held_out: bool) -> list[str]:
    """Returns the items to train on, or the few that are kept aside."""
    shuffled = sorted(items)
    random.Random(7).shuffle(shuffled)
    cut = max(1, int(len(shuffled) * _HELD_OUT_SHARE))
    return shuffled[:cut] if held_out else shuffled[cut:]


@dataclass(frozen=True)
class Prompt:
    """Something to answer: ``messages`` of a chat, or, where there are none, ``text`` to continue."""

    kind: str
    messages: Messages
    text: str = ""


class PromptMaker:
    """Draws prompts. ``units``: pieces of code (``training.corpus``). ``texts``: what the model has
    written, as far as there is some, for prompts that hold a text or go on with a conversation.
    ``held_out``: from the subjects that are kept aside. ``own_share``: of prompts that the model is to
    think of itself."""

    def __init__(
        self,
        rng: random.Random,
        units: Sequence[str],
        held_out: bool = False,
        own_share: float = OWN_SHARE,
    ) -> None:
        self._rng = rng
        self.own_share = own_share
        self._units = units
        self._subjects = _split(_words(_SUBJECTS), held_out)
        self._code_tasks = _split(_words(_CODE_TASKS), held_out)
        self.texts: list[str] = []
        kinds: dict[str, tuple[Callable[[], Prompt], float]] = {
            "chat": (self._chat, 4.0),
            "code_chat": (self._code_chat, 1.5),
            "code_question": (self._code_question, 1.0),
            "edit": (self._edit, 2.0),
            "code": (self._code, 1.5),
            "text": (self._text, 1.0),
        }
        self._makers = [maker for maker, _ in kinds.values()]
        self._weights = [weight for _, weight in kinds.values()]

    def draw(self) -> Prompt:
        return self._rng.choices(self._makers, self._weights)[0]()

    def follow_up(self, messages: Messages, reply: str) -> Prompt:
        """Returns the next turn of a conversation."""
        turn = {"role": "assistant", "content": reply}
        asked = {"role": "user", "content": self._rng.choice(_FOLLOW_UPS)}
        return Prompt("follow_up", [*messages, turn, asked])

    def _asked(self, kind: str, content: str) -> Prompt:
        messages = [{"role": "user", "content": content}]
        if self._rng.random() < 0.1:
            messages.insert(0, {"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
        return Prompt(kind, messages)

    def _chat(self) -> Prompt:
        task = self._rng.choice(_TASKS)
        return self._asked("chat", task.format(*self._rng.sample(self._subjects, task.count("{}"))))

    def _code_chat(self) -> Prompt:
        rng = self._rng
        form = rng.choice(_CODE_FORMS)
        task, language = rng.choice(self._code_tasks), rng.choice(_LANGUAGES)
        return self._asked("code_chat", form.format(task=task, language=language))

    def _code_question(self) -> Prompt:
        code = self._rng.choice(self._units)[:1500]
        return self._asked("code_question", f"{self._rng.choice(_CODE_QUESTIONS)}\n\n{code}")

    def _edit(self) -> Prompt:
        edit = make_edit(self._rng, base_text(self._rng, self._units, 1500, 0.15), 0.03)
        return self._asked("edit", user_content(self._rng, edit))

    def _code(self) -> Prompt:
        """The beginning of a piece of code, to be continued."""
        code = self._rng.choice(self._units)
        return Prompt("code", [], code[: max(30, int(len(code) * self._rng.uniform(0.15, 0.6)))])

    def _text(self) -> Prompt:
        if not self.texts:
            return self._chat()
        text = self._rng.choice(self.texts)[:1500]
        return self._asked("text", f"{self._rng.choice(_TEXT_QUESTIONS)}\n\n{text}")


class GivenPrompts(PromptMaker):
    """Draws from prompts that somebody has. ``held_out``: from the tenth of them that is kept aside."""

    def __init__(
        self, rng: random.Random, prompts: Sequence[Prompt], held_out: bool = False
    ) -> None:
        super().__init__(rng, [], held_out, own_share=0.0)
        self._prompts = [each for at, each in enumerate(prompts) if (at % 10 == 0) == held_out]

    def keep(self, fits: Callable[[Prompt], bool]) -> int:
        """Leaves out the others; returns how many. Raises ValueError where none is left."""
        kept = [each for each in self._prompts if fits(each)]
        if not kept:
            raise ValueError(f"none of {len(self._prompts)} prompts can be asked")
        num_left_out = len(self._prompts) - len(kept)
        self._prompts = kept
        return num_left_out

    def draw(self) -> Prompt:
        return self._rng.choice(self._prompts)


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file of JSON lines with ``prompt`` (a text to go on with) or ``messages``
    (a chat). Raises ValueError naming the first line that has neither."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if "messages" in row:
            found.append(Prompt("given", row["messages"]))
        elif "prompt" in row:
            found.append(Prompt("given", [], row["prompt"]))
        else:
            raise ValueError(f"{path} line {number}: neither prompt nor messages")
    return found
