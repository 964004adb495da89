"""Who waits for a seat, in the policy's order, each tenant in a line of its own.

A tenant whose next sequence would take it over its bound of running tokens is full: its line is
passed by, at no cost, until a row of it leaves; the others do not notice. A tenant that has nothing
running is never full, so nobody waits for ever.

Tenants take turns by what they have been served (tokens: of a prompt when it is first seated, of
the output as they are committed), as far as the policy cares. Whoever comes back to the queue
starts no lower than where the one seated last stood: being away earns nothing (start-time fair
queueing).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from scheduler_svc.core.policies import Policy
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.types import Request

Key = tuple[int, ...]
# Tenants with nothing live whose debt is remembered; the longest away is forgiven.
DEBTORS_MAX = 1024
_key = itemgetter(0)


@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant with live requests."""

    name: str
    # Tokens; only ever compared with other tenants'.
    served: int
    tokens_max: int | None = None
    requests: int = 0
    rows: int = 0
    # Of its rows, each at its longest.
    tokens_running: int = 0
    line: list[tuple[Key, Sequence]] = field(default_factory=list)
    # Of its line, when the line may move.
    seatable: int = 0
    # Its place in the heap; None: it is full, or nothing waits.
    turn: "Turn | None" = None

    @property
    def is_full(self) -> bool:
        """What waits first would exceed the bound. One sequence alone may always run."""
        if self.tokens_max is None or not self.rows or not self.line:
            return False
        return self.tokens_running + self.line[0][1].tokens_max > self.tokens_max


# No two keys are equal, so tenants are never compared.
Turn = tuple[int, Key, Tenant]


class WaitingQueue:
    """Lines by tenant, and a heap of the lines that may move.

    Every command leaves the heap with a current turn on top, so that questions change nothing.
    """

    def __init__(self, policy: Policy, tenant_tokens_max: int | None = None) -> None:
        self.tenants: dict[str, Tenant] = {}
        # Sequences in lines that may move.
        self.seatable = 0
        self._policy = policy
        self._tokens_max = tenant_tokens_max
        self._heap: list[Turn] = []
        self._count = 0
        # What the one seated last had been served before.
        self._floor = 0
        self._debtors: dict[str, int] = {}

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)}>"

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, in the order in which they would be seated if nobody else came."""
        return self._merged([tenant for tenant in self.tenants.values() if tenant.line])

    # Questions

    def in_turn(self) -> Iterator[Sequence]:
        """Who may be seated next; those behind are for when the ones before do not fit."""
        if not self._heap:
            return
        yield self._heap[0][2].line[0][1]
        lines = [tenant for tenant in self.tenants.values() if tenant.turn is not None]
        yield from islice(self._merged(lines, is_charged=False), 1, None)

    def turn(self, sequence: Sequence) -> Key:
        """A sequence's place among others, waiting or running."""
        return (self._policy.share(sequence.life.tenant.served), *self._policy.order(sequence))

    # Requests come and go

    def welcome(self, request: Request) -> Tenant:
        """The tenant of a new request."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            tenant = Tenant(request.tenant, self._debtors.pop(request.tenant, 0))
            self.tenants[tenant.name] = tenant
        tenant.requests += 1
        tenant.tokens_max = request.tenant_tokens_max or self._tokens_max
        self._place(tenant)
        return tenant

    def farewell(self, tenant: Tenant) -> None:
        """A request is over. Of a tenant without any, only what it owes is kept."""
        tenant.requests -= 1
        if tenant.requests:
            return
        del self.tenants[tenant.name]
        if tenant.served > self._floor:
            self._debtors[tenant.name] = tenant.served
            if len(self._debtors) > DEBTORS_MAX:
                del self._debtors[next(iter(self._debtors))]

    # Sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its key says."""
        tenant = sequence.life.tenant
        if not tenant.line:
            tenant.served = max(tenant.served, self._floor)
        insort(tenant.line, (self._policy.order(sequence), sequence), key=_key)
        self._count += 1
        self._place(tenant)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False when it was not waiting."""
        tenant = sequence.life.tenant
        index = bisect_left(tenant.line, self._policy.order(sequence), key=_key)
        if index == len(tenant.line) or tenant.line[index][1] is not sequence:
            return False
        del tenant.line[index]
        self._count -= 1
        self._place(tenant)
        return True

    def seat(self, sequence: Sequence, tokens_done: int) -> None:
        """Take a sequence out, for a seat. Its tenant pays for what is to be computed of it, once:
        to be preempted is no service.
        """
        tenant = sequence.life.tenant
        self.remove(sequence)
        self._floor = max(self._floor, tenant.served)
        if sequence.state is State.WAITING:
            tenant.served += len(sequence.tokens) - tokens_done
        tenant.rows += 1
        tenant.tokens_running += sequence.tokens_max
        self._place(tenant)

    def left(self, sequence: Sequence) -> None:
        """A seat is free again."""
        tenant = sequence.life.tenant
        tenant.rows -= 1
        tenant.tokens_running -= sequence.tokens_max
        self._place(tenant)

    def settle(self) -> None:
        """Tenants may have been served since: bring the top of the heap up to date."""
        while self._heap:
            turn = self._heap[0]
            tenant = turn[2]
            if tenant.turn is not turn:
                heapq.heappop(self._heap)
            elif turn[0] < self._policy.share(tenant.served):
                tenant.turn = self._turn_of(tenant)
                assert tenant.turn is not None
                heapq.heapreplace(self._heap, tenant.turn)
            else:
                return

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when the books do not balance with those who run."""
        lines = [tenant for tenant in self.tenants.values() if tenant.turn is not None]
        assert self._count == sum(len(tenant.line) for tenant in self.tenants.values())
        assert self.seatable == sum(len(tenant.line) for tenant in lines)
        assert all((t.turn is None) == (t.is_full or not t.line) for t in self.tenants.values())
        assert next(self.in_turn(), None) is next(self._merged(lines, is_charged=False), None)
        rows = dict.fromkeys(self.tenants.values(), (0, 0))
        for sequence in running:
            count, tokens = rows[sequence.life.tenant]
            rows[sequence.life.tenant] = (count + 1, tokens + sequence.tokens_max)
        assert rows == {t: (t.rows, t.tokens_running) for t in self.tenants.values()}

    # Inside

    def _turn_of(self, tenant: Tenant) -> Turn | None:
        if tenant.is_full or not tenant.line:
            return None
        return (self._policy.share(tenant.served), tenant.line[0][0], tenant)

    def _place(self, tenant: Tenant) -> None:
        """Something of the tenant has changed: it may be full, or no longer, or another leads."""
        turn = self._turn_of(tenant)
        if turn != tenant.turn:
            tenant.turn = turn
            if turn is not None:
                heapq.heappush(self._heap, turn)
        seatable = len(tenant.line) if turn is not None else 0
        self.seatable += seatable - tenant.seatable
        tenant.seatable = seatable
        if len(self._heap) > 2 * len(self.tenants) + 8:
            # Mostly turns that are over.
            self._heap = [t.turn for t in self.tenants.values() if t.turn is not None]
            heapq.heapify(self._heap)
        self.settle()

    def _merged(self, lines: Iterable[Tenant], *, is_charged: bool = True) -> Iterator[Sequence]:
        """Lines merged by turn; charged: as if everybody was seated as they come."""
        share = self._policy.share
        heap = [(share(t.served), t.line[0][0], t.served, 0, t) for t in lines]
        heapq.heapify(heap)
        while heap:
            _, _, served, index, tenant = heap[0]
            sequence = tenant.line[index][1]
            yield sequence
            if is_charged and sequence.state is State.WAITING:
                served += len(sequence.tokens)
            index += 1
            if index < len(tenant.line):
                turn = (share(served), tenant.line[index][0], served, index, tenant)
                heapq.heapreplace(heap, turn)
            else:
                heapq.heappop(heap)
