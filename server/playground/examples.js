// What the page can be tried with. Each fills the whole request.

// The id of the small code model that comes with the server: it knows edits of code and nothing else.
const BUNDLED = "slipstream-bundled";

const LETTER = `Dear Ms Novak,

Thank you for you're letter of 3 March. We has received your order, and it will be send on Monday. \
If you have any questions, please write to us at any time.

Yours sincerely,
Tom Baker`;

const TABLE = `def load_table(path, separator=","):
    """Read numbers from a file."""
    rows = []
    with open(path) as stream:
        for line in stream:
            parts = line.strip().split(separator)
            rows.append([float(part) for part in parts])
    return rows`;

const ACCOUNT = `class Account:
    """Money that belongs to someone."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount`;

const PREFIX = `class Queue:
    """A queue of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Add an item at the end."""
        self.items.append(item)

    def pop(self):
        """Remove the first item."""
`;

const TESTS = `import pytest

def add(a, b):
    return a + b

def test_add_small():
    assert add(1, 2) == 3

def test_add_zero():
    assert add(0, 0) == 0

def test_add_negative():
`;

export const EXAMPLES = [
  {
    name: "Edit: correct a letter",
    mode: "chat",
    suits: (card) => card.id !== BUNDLED,
    text: `Correct the grammar of this letter. Answer with the letter only.\n\n${LETTER}`,
    maxTokens: 160,
    temperature: 0,
  },
  {
    name: "Chat: a question, sampled",
    mode: "chat",
    suits: (card) => card.id !== BUNDLED,
    text: "Give me three tips for a good night's sleep.",
    maxTokens: 160,
    temperature: 0.7,
  },
  {
    name: "Edit: rename a function",
    mode: "chat",
    suits: (card) => card.id === BUNDLED,
    text: `Please rename \`load_table\` to \`load_numbers\`.\n\n${TABLE}`,
    maxTokens: 200,
    temperature: 0,
  },
  {
    name: "Edit: rename a class, sampled",
    mode: "chat",
    suits: (card) => card.id === BUNDLED,
    text: `Please rename \`Account\` to \`Wallet\`.\n\n${ACCOUNT}`,
    maxTokens: 240,
    temperature: 0.5,
  },
  {
    name: "Code: go on with a class",
    mode: "completion",
    suits: () => true,
    text: PREFIX,
    maxTokens: 160,
    temperature: 0,
  },
  {
    name: "Code: go on with tests, sampled",
    mode: "completion",
    suits: () => true,
    text: TESTS,
    maxTokens: 160,
    temperature: 0.7,
  },
];
