"""Random lives of requests in a tiny pool: see ``worlds.pool_machine``."""

from hypothesis import settings

from worlds.lanes import examples
from worlds.pool_machine import PoolMachine

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)
