"""Counts the house (``scripts/house``), so that a redesign can be measured before and after.

Lines are lines of text in ``*.py`` files, as ``wc -l`` counts them. Functions and docstrings are those of
the five serving folders; a function is as long as its text from ``def`` on. Files flat in a package are
those in its own folder, ``__init__.py`` apart.

An arrow leads from a room to a room that it imports: in a package a room is a file in the package's own
folder or a folder in it, in the house it is a package. Floors are numbered from rooms that import no
other; a chain of imports is counted in files. Imports inside functions count as others do. Arrows run up
where rooms import each other in a circle: as few of them as would have to go for none to be left.

With ``--request`` one streamed chat completion is sent to the application in this process, which runs the
bundled model, after another one that warms it up. Functions are those of ours that are called in any
thread from when the request is sent until its reply has ended: public ones, whose names begin with no
underscore and which are no properties, and beside them all that have a name. A step's are those that its
thread calls from when the core's ``step`` begins until it ends; of all steps the median is told. Types
are classes of ours: values (dataclasses, named tuples) that are made meanwhile, and beside them all whose
methods are called. Reading HTTP off a socket is not counted, nor are the bodies' models, which pydantic
makes.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from inspect import getattr_static
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVING = ("server", "engine", "drafters", "compiled", "kvpool")
PACKAGES = (*SERVING, "slipstream")
TESTS = "tests"
REST = ("slipstream", "bench", "training", "deploy", "examples", "scripts")
LONG = 60
"""Lines; functions of more are long."""
RIDDLES = ("What", "Who", "Of", "By")
"""Words that no sentence with a subject begins with."""
PROMPT = "Write a short story about a lighthouse keeper who counts ships."
MAX_TOKENS = 32

Graph = Mapping[str, set[str]]


def sources(*folders: str) -> list[Path]:
    """Returns the Python files of these folders, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def num_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- imports ---


def imports_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Returns which of the modules each of them imports, all by their full names."""
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                # ``from package import module`` needs the module, not the package's own file.
                names |= inside & set(files) or {node.module}
        found[module] = (names & set(files)) - {module}
    return found


def modules(*packages: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(*packages)
    }


def gathered(graph: Graph, rooms: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the graph of rooms. ``rooms``: of each module; those without one are left out."""
    found: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, names in graph.items():
        if module in rooms:
            found[rooms[module]] |= {rooms[name] for name in names if name in rooms}
    return {room: names - {room} for room, names in found.items()}


def room_in_package(module: str) -> str | None:
    """Returns the room that a module is in; None for the package's own ``__init__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def circles(graph: Graph) -> list[list[str]]:
    """Returns the sets of more than one node that reach each other (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for name in sorted(graph[node]):
            if name not in number:
                visit(name)
                low[node] = min(low[node], low[name])
            elif name in stack:
                low[node] = min(low[node], number[name])
        if low[node] == number[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return [each for each in found if len(each) > 1]


def rising(graph: Graph) -> set[tuple[str, str]]:
    """Returns the arrows that run up: as few as possible, by the best order of each circle."""
    found: set[tuple[str, str]] = set()
    for circle in circles(graph):
        best: dict[frozenset[str], set[tuple[str, str]]] = {frozenset(): set()}
        for _ in circle:
            longer: dict[frozenset[str], set[tuple[str, str]]] = {}
            for below, up in best.items():
                for node in circle:
                    if node in below:
                        continue
                    now = up | {(node, name) for name in graph[node] & ({*circle} - below - {node})}
                    above = below | {node}
                    if above not in longer or len(now) < len(longer[above]):
                        longer[above] = now
            best = longer
        found |= best[frozenset(circle)]
    return found


def heights(graph: Graph) -> dict[str, int]:
    """Returns of each node how many nodes the longest chain from it down has, rising arrows left out."""
    up = rising(graph)

    @cache
    def height(node: str) -> int:
        below = (name for name in graph[node] if (node, name) not in up)
        return 1 + max(map(height, below), default=0)

    return {node: height(node) for node in graph}


# --- functions and docstrings ---

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(paths: Iterable[Path]) -> Iterator[tuple[str, int]]:
    """Yields file and name of each function, and its length in lines."""
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                assert node.end_lineno is not None
                yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1


def docstrings(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the texts that stand as statements of their own, those below names included."""
    for path in paths:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Expr(ast.Constant(str(text))):
                    yield text


# --- one request ---


class Passage:
    """Notes what is called while ``is_on``, in every thread that begins after it."""

    def __init__(self, step: CodeType) -> None:
        """``step``: the function whose calls are counted apart."""
        self.is_on = False
        self.functions: dict[CodeType, bool] = {}
        """And whether each is public."""
        self.types: dict[type, bool] = {}
        """And whether each is a value's, and was made."""
        self.steps: list[set[CodeType]] = []
        self._step = step
        self._in_step = threading.local()
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if not self.is_on or event not in ("call", "return"):
            return
        code = frame.f_code
        if code is self._step:
            self._in_step.functions = set() if event == "call" else None
            if event == "call":
                self.steps.append(self._in_step.functions)
        if event == "call":
            self._note(frame, code)

    def _note(self, frame: FrameType, code: CodeType) -> None:
        kind = _owner(frame, code)
        if kind is not None and kind.__module__.partition(".")[0] in PACKAGES:
            is_made = code.co_name in ("__init__", "__post_init__") or code.co_varnames[0] == "_cls"
            self.types[kind] = self.types.get(kind, False) or (is_made and _is_value(kind))
        if code.co_name.startswith("<") or not _is_ours(code.co_filename):
            return
        if code not in self.functions:
            is_property = kind and isinstance(getattr_static(kind, code.co_name, None), property)
            self.functions[code] = not (is_property or code.co_name.startswith("_"))
        within = getattr(self._in_step, "functions", None)
        if within is not None:
            within.add(code)

    def end(self) -> None:
        self.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)


def _owner(frame: FrameType, code: CodeType) -> type | None:
    """Returns the class whose method is called; named tuples are made by functions of ``_cls``."""
    if not code.co_argcount or code.co_varnames[0] not in ("self", "cls", "_cls"):
        return None
    owner = frame.f_locals.get(code.co_varnames[0])
    return owner if isinstance(owner, type) else type(owner)


def _is_value(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, tuple)


@cache
def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


async def pass_through() -> Passage:
    """Returns what one streamed chat has passed."""
    # Imported late: torch takes seconds to load, and what is read off the sources needs none.
    import httpx

    from engine.build import build_engine
    from engine.config import EngineConfig
    from engine.core import EngineCore
    from server.app import build_app
    from server.settings import Settings

    settings = Settings()
    app = build_app(*build_engine(EngineConfig()), settings)
    passage = Passage(EngineCore.step.__code__)
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
            for passage.is_on in (False, True):
                reply = await client.post("/v1/chat/completions", json=body)
                reply.raise_for_status()
                assert reply.text.endswith("data: [DONE]\n\n")
        passage.end()
    return passage


# --- what is printed ---


def print_sizes() -> None:
    print("lines of Python")
    for name in (*SERVING, TESTS, *REST):
        paths = sources(name)
        print(f"  {name:12}{num_lines(paths):7} in {len(paths)} files")
    print(f"  {'serving':12}{num_lines(sources(*SERVING)):7}")
    for name in ("engine", "server"):
        flat = [path for path in (ROOT / name).glob("*.py") if path.stem != "__init__"]
        print(f"files flat in {name}: {len(flat)}")


def print_imports() -> None:
    whole = imports_of(modules(*PACKAGES))
    for package in PACKAGES:
        own = imports_of(modules(package))
        rooms = {module: room for module in own if (room := room_in_package(module))}
        graph = gathered(own, rooms)
        print(
            f"{package}: longest chain of imports {max(heights(own).values())}, "
            f"{len(graph)} rooms on {max(heights(graph).values(), default=0)} floors, "
            f"{sum(map(len, graph.values()))} arrows, {_up(graph)}"
        )
    house = gathered(whole, {module: module.partition(".")[0] for module in whole})
    arrows = sum(map(len, house.values()))
    print(f"the house: {max(heights(house).values())} floors, {arrows} arrows, {_up(house)}")


def _up(graph: Graph) -> str:
    up = sorted(rising(graph))
    return f"{len(up)} up{': ' if up else ''}" + ", ".join(f"{low} -> {high}" for low, high in up)


def print_words() -> None:
    lengths = sorted(functions(sources(*SERVING)), key=lambda each: -each[1])
    long = [f"{name} {length}" for name, length in lengths if length > LONG]
    print(f"functions: {len(lengths)}, median {median(length for _, length in lengths):g} lines")
    print(f"functions over {LONG} lines: {len(long)}  {', '.join(long)}")
    begin = re.compile(rf"\s*(?:{'|'.join(RIDDLES)})\b")
    for name, folders in (("serving", SERVING), ("tests", (TESTS,))):
        found = sum(begin.match(text) is not None for text in docstrings(sources(*folders)))
        print(f"docstrings that begin with {', '.join(RIDDLES)} ({name}): {found}")
    pages = sorted((ROOT / "docs").rglob("*.md"))
    print(f"words of docs: {sum(len(page.read_text('utf-8').split()) for page in pages)}")
    print(f"lines of README: {num_lines([ROOT / 'README.md'])}")


def print_request(names: bool) -> None:
    passage = asyncio.run(pass_through())
    public = {code for code, is_public in passage.functions.items() if is_public}
    steps = [len(step & public) for step in passage.steps]
    print("a streamed chat passes")
    print(f"  public functions    {len(public)}, {median(steps):g} of them in a step")
    print(f"  all functions       {len(passage.functions)}")
    print(f"  types of values     {sum(passage.types.values())}")
    print(f"  all types           {len(passage.types)}")
    if names:
        for code in sorted(passage.functions, key=lambda each: (each.co_filename, each.co_name)):
            place = Path(code.co_filename).relative_to(ROOT)
            print(f"  {'public' if code in public else ' ' * 6} {place} {code.co_qualname}")
        for kind, is_value in sorted(passage.types.items(), key=lambda each: str(each[0])):
            print(f"  {'value' if is_value else 'type '} {kind.__module__}.{kind.__qualname__}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/house", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--request", action="store_true", help="send a chat, and count what it passes"
    )
    parser.add_argument("--names", action="store_true", help="and name it")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print_sizes()
    print_imports()
    print_words()
    if asked.request:
        print_request(asked.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
