"""Replicas, their router and their clients: one simpy process for each replica, one event a step."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import simpy

from engine.request.params import SpeculativeParams
from slipstream.tools.simulate.profile import Profile
from slipstream.tools.simulate.replica import Replica, Served, SimulatedCost, Totals
from slipstream.tools.simulate.routing import Router
from slipstream.tools.simulate.work import Work

Events = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Run:
    """The result of a run. ``served``: every request, in order of arrival. ``seconds``: until the last
    one ended."""

    num_replicas: int
    served: list[Served] = field(default_factory=list)
    totals: list[Totals] = field(default_factory=list)
    seconds: float = 0.0


class Fleet:
    """A fleet of ``num_replicas`` with one profile, ``per_machine`` on each machine."""

    def __init__(
        self,
        profile: Profile,
        num_replicas: int,
        speculative: SpeculativeParams,
        router: Router,
        per_machine: int = 1,
    ) -> None:
        """Raises ValueError for numbers below 1, and for drafters that cannot be simulated."""
        if num_replicas < 1 or per_machine < 1:
            raise ValueError("replicas and replicas per machine must be at least 1")
        cost = SimulatedCost(profile.costs)
        self._replicas = [
            Replica(number, profile, cost, speculative) for number in range(num_replicas)
        ]
        self._machines = [
            self._replicas[number // per_machine * per_machine :][:per_machine]
            for number in range(num_replicas)
        ]
        self._slowdown = profile.costs.with_neighbour - 1.0
        self._admission = profile.costs.per_admission
        # By replica: when its server has done what it has to do for those who came, and for how long
        # that kept the engine from the step under way.
        self._servers_free: dict[int, float] = {}
        self._kept_from_step: dict[int, float] = {}
        self._router = router
        self._run = Run(num_replicas, totals=[each.totals for each in self._replicas])

    def run(self, works: Iterable[Work]) -> Run:
        """All requests, which come in the order of their times, to their end. Once a fleet."""
        environment = simpy.Environment()
        self._idle: dict[int, simpy.Event] = {}
        for replica in self._replicas:
            environment.process(self._steps(environment, replica))
        environment.process(self._arrivals(environment, works))
        environment.run()
        self._run.seconds = environment.now
        return self._run

    def _arrivals(self, environment: simpy.Environment, works: Iterable[Work]) -> Events:
        for work in works:
            yield environment.timeout(max(0.0, work.at - environment.now))
            number = self._router.send(work.tenant)
            served = Served(work, number)
            self._run.served.append(served)
            if self._admission:
                environment.process(self._admission_of(environment, served))
            else:
                self._submit(served)

    def _admission_of(self, environment: simpy.Environment, served: Served) -> Events:
        """The server takes in one request after the other. It shares its cores with the engine: of a step
        under way each has half of the time."""
        number, seconds = served.replica, self._admission
        if self._replicas[number].is_busy:
            self._kept_from_step[number] = self._kept_from_step.get(number, 0.0) + seconds
            seconds *= 2
        free = max(environment.now, self._servers_free.get(number, 0.0)) + seconds
        self._servers_free[number] = free
        yield environment.timeout(free - environment.now)
        self._submit(served)

    def _submit(self, served: Served) -> None:
        number = served.replica
        if not self._replicas[number].submit(served):
            self._router.done(number)
        elif number in self._idle:
            self._idle.pop(number).succeed()

    def _steps(self, environment: simpy.Environment, replica: Replica) -> Events:
        while True:
            if not replica.num_open:
                woken = self._idle[replica.number] = environment.event()
                yield woken
            started = environment.now
            left = replica.begin() * self._contention(replica)
            while left:
                yield environment.timeout(left)
                left = self._kept_from_step.pop(replica.number, 0.0)
            for served in replica.end(environment.now, environment.now - started):
                self._router.done(served.replica)

    def _contention(self, replica: Replica) -> float:
        """Returns the factor by which busy neighbours slow down the step that begins."""
        machine = self._machines[replica.number]
        if len(machine) == 1:
            return 1.0
        num_busy = sum(each.is_busy for each in machine) - 1
        return 1.0 + self._slowdown * num_busy / (len(machine) - 1)
