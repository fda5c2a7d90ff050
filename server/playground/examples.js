// What the page can be tried with. Each fills the whole request.

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
    name: "Edit: rename a function",
    mode: "chat",
    text: `Please rename \`load_table\` to \`load_numbers\`.\n\n${TABLE}`,
    maxTokens: 200,
    temperature: 0,
  },
  {
    name: "Edit: rename a class, sampled",
    mode: "chat",
    text: `Please rename \`Account\` to \`Wallet\`.\n\n${ACCOUNT}`,
    maxTokens: 240,
    temperature: 0.5,
  },
  {
    name: "Code: go on with a class",
    mode: "completion",
    text: PREFIX,
    maxTokens: 160,
    temperature: 0,
  },
  {
    name: "Code: go on with tests, sampled",
    mode: "completion",
    text: TESTS,
    maxTokens: 160,
    temperature: 0.7,
  },
];
