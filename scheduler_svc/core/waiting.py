"""Who waits for a slot, in the policy's order: a queue per tenant, and a heap of the heads of those
that may move. Flex requests stand behind all others, whosever they are.

A tenant whose next sequence would take it over its bound of running tokens is throttled: its queue
is passed over, at no cost, until one of its sequences leaves a batch; the others do not notice. A
tenant that has nothing running is never throttled, so nobody waits for ever.

Among tenants this is start-time fair queueing, as far as the policy cares: each has a counter of
the tokens it was served (of a prompt when it is first admitted, of the output as they are
committed), which counts by the tenant's weight, and whoever comes back to the queue starts no lower
than the virtual time, which is where the tenant admitted last stood. With all that is served the
virtual time moves on by each tenant's part of it, as in processor sharing (Demers et al., "Analysis
and Simulation of a Fair Queueing Algorithm", SIGCOMM 1989): or whoever was served once would wait
for as long as there are tenants that never were.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter

from scheduler_svc.core.policy.order import Order
from scheduler_svc.core.requests import Arrival, Head, Key, Rank, Sequence, State, Tenant
from scheduler_svc.core.types import Config, Request

# Tenants with nothing live whose counter is remembered; the longest away is forgotten.
IDLE_TENANTS_MAX = 1024
# A tenant's service by its weight is a whole number: as good as exact for weights up to 1000.
WEIGHT_UNIT = 720_720
_key = itemgetter(0)


class WaitingQueue:
    """Queues by tenant, and a heap of the heads of those that may move.

    Every command leaves the heap with a current head on top, so that questions change nothing.
    """

    def __init__(self, order: Order) -> None:
        self.tenants: dict[str, Tenant] = {}
        # Those whose next sequence would take them over their bound.
        self.throttled: dict[Tenant, None] = {}
        # How often somebody was, or was no more: for who has seen them at this count.
        self.num_throttlings = 0
        # Sequences in queues that may move.
        self.num_admissible = 0
        # KV places of everybody, each at its longest, the fewest first.
        self.places: list[int] = []
        self._order = order
        self._tokens_max: int | None = None
        # 0: no longest wait is promised.
        self._wait_ns_max = 0
        self._weights: dict[str, int] = {}
        self._heap: list[Head] = []
        # Of each tenant that may move, who arrived first, where a longest wait is promised.
        self._oldest: list[Arrival] = []
        # How much a tenant that never stopped asking would have been served.
        self._virtual_time = 0
        self._idle_tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)}>"

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, in the order in which they would be admitted if nobody else came."""
        heap = [self._head_of(tenant) for tenant in self.tenants.values() if tenant.queue]
        heapq.heapify(heap)
        return self._merged(heap, is_charged=True)

    # Questions

    def num_overdue(self, now_ns: int) -> int:
        """Tenants that may move and of whom somebody has waited longer than is promised."""
        return bisect_right(self._oldest, now_ns - self._wait_ns_max, key=_key)

    def overdue(self, now_ns: int) -> list[Sequence]:
        """Of each of those who has waited longest; the longest first."""
        return [arrival[-1] for arrival in self._oldest[: self.num_overdue(now_ns)]]

    def next_up(self, now_ns: int) -> Iterator[Sequence]:
        """Who may be admitted next, those first who have waited longer than is promised."""
        yield from (arrival[-1] for arrival in islice(self._oldest, self.num_overdue(now_ns)))
        first = frozenset(self.overdue(now_ns))
        yield from (s for s in self.in_order() if s not in first) if first else self.in_order()

    def in_order(self) -> Iterator[Sequence]:
        """Who may be admitted next; those behind are for when the ones before do not fit."""
        return self._merged(self._heap, is_charged=False)

    @property
    def has_non_flex(self) -> bool:
        """Somebody who may be admitted next is not flex."""
        return bool(self._heap) and not self._heap[0][2].queue[0][1].is_flex

    def key(self, sequence: Sequence) -> Key:
        """A sequence's place among others, waiting or running."""
        tenant = sequence.live.tenant
        return (*self._rank(sequence, tenant.served), *self._order.key(sequence))

    def ahead(self) -> Iterator[tuple[str, int]]:
        """Tenants that were served more than the virtual time, by how many tokens."""
        served = self._idle_tenants | {name: t.served for name, t in self.tenants.items()}
        for name, tokens in served.items():
            base = self._virtual_time * self._weights.get(name, 1) // WEIGHT_UNIT
            if tokens > base:
                yield name, tokens - base

    def put_ahead(self, name: str, tokens: int) -> None:
        """A tenant was served so many tokens more, before this queue began."""
        if tenant := self.tenants.get(name):
            tenant.served += tokens
            self._update(tenant)
        else:
            self._idle_tenants[name] = tokens

    def configure(self, order: Order, config: Config) -> None:
        """Sort everybody anew. Tenants stay where they are among others, whatever they weigh now,
        and begin alike where the order was not fair.
        """
        before, self._weights = self._weights, dict(config.tenant_weights)
        alike = order.is_fair and not self._order.is_fair
        self._order, self._tokens_max = order, config.tenant_tokens_max
        self._wait_ns_max = config.wait_ns_max or 0

        def served(name: str, tokens: int) -> int:
            place = self._virtual_time if alike else tokens * WEIGHT_UNIT // before.get(name, 1)
            return place * self._weights.get(name, 1) // WEIGHT_UNIT

        self._idle_tenants = {name: served(name, t) for name, t in self._idle_tenants.items()}
        for tenant in self.tenants.values():
            tenant.served = served(tenant.name, tenant.served)
            waiting, tenant.queue, tenant.arrivals = tenant.queue, [], []
            tenant.weight = self._weights.get(tenant.name, 1)
            for _, sequence in waiting:
                self._insert(sequence)
            self._update(tenant)

    # Requests come and go

    def add_request(self, request: Request) -> Tenant:
        """The tenant of a new request."""
        if (tenant := self.tenants.get(request.tenant)) is None:
            tenant = Tenant(request.tenant, self._idle_tenants.pop(request.tenant, 0))
            tenant.weight = self._weights.get(tenant.name, 1)
            self.tenants[tenant.name] = tenant
        tenant.num_requests += 1
        tenant.tokens_max_asked = request.tenant_tokens_max
        self._update(tenant)
        return tenant

    def remove_request(self, tenant: Tenant, num_output_tokens: int) -> None:
        """A request is over. Of a tenant without any, only its counter is kept."""
        self._virtual_time += self._part(tenant, num_output_tokens)
        tenant.num_requests -= 1
        if tenant.num_requests:
            return
        del self.tenants[tenant.name]
        if _weighted(tenant, tenant.served) > self._virtual_time:
            self._idle_tenants[tenant.name] = tenant.served
            if len(self._idle_tenants) > IDLE_TENANTS_MAX:
                del self._idle_tenants[next(iter(self._idle_tenants))]

    # Sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its key says."""
        tenant = sequence.live.tenant
        if not tenant.queue:
            tenant.served = max(tenant.served, self._virtual_time * tenant.weight // WEIGHT_UNIT)
        self._insert(sequence)
        insort(self.places, sequence.kv.places_max)
        self._update(tenant)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False when it was not waiting."""
        tenant = sequence.live.tenant
        index = bisect_left(tenant.queue, sequence.queue_key, key=_key)
        if index == len(tenant.queue) or tenant.queue[index][1] is not sequence:
            return False
        del tenant.queue[index]
        if self._is_promised(sequence):
            del tenant.arrivals[bisect_left(tenant.arrivals, _arrival(sequence))]
        del self.places[bisect_left(self.places, sequence.kv.places_max)]
        self._update(tenant)
        return True

    def admit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Take a sequence out, for a slot. Its tenant pays for what is to be computed of it, once:
        to be preempted is no service.
        """
        tenant = sequence.live.tenant
        self.remove(sequence)
        self._virtual_time = max(self._virtual_time, _weighted(tenant, tenant.served))
        if sequence.state is State.WAITING:
            tokens = len(sequence.tokens) - num_computed_tokens
            self._virtual_time += self._part(tenant, tokens)
            tenant.served += tokens
        tenant.num_running += 1
        tenant.tokens_running += sequence.tokens_max
        self._update(tenant)

    def has_left(self, sequence: Sequence) -> None:
        """A running sequence has given its slot up."""
        tenant = sequence.live.tenant
        tenant.num_running -= 1
        tenant.tokens_running -= sequence.tokens_max
        self._update(tenant)

    def settle(self) -> None:
        """Tenants may have been served since: bring the top of the heap up to date."""
        while self._heap:
            head = self._heap[0]
            tenant = head[2]
            if tenant.head is not head:
                heapq.heappop(self._heap)
            elif head[0] < self._rank(tenant.queue[0][1], tenant.served):
                tenant.head = self._head_of(tenant)
                heapq.heapreplace(self._heap, tenant.head)
            else:
                return

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when the books do not balance with those who run."""
        tenants = self.tenants.values()
        movable = [tenant for tenant in tenants if tenant.head is not None]
        assert self.places == sorted(s.kv.places_max for t in tenants for _, s in t.queue)
        assert self.num_admissible == sum(len(tenant.queue) for tenant in movable)
        assert all((t.head is None) == (t.is_throttled or not t.queue) for t in tenants)
        assert self.throttled.keys() == {t for t in tenants if t.is_throttled}
        assert self._oldest == sorted(t.arrivals[0] for t in movable if t.arrivals)
        assert [*self.in_order()] == sorted([s for t in movable for _, s in t.queue], key=self.key)
        totals = dict.fromkeys(tenants, (0, 0))
        for sequence in running:
            count, tokens = totals[sequence.live.tenant]
            totals[sequence.live.tenant] = (count + 1, tokens + sequence.tokens_max)
        assert totals == {t: (t.num_running, t.tokens_running) for t in tenants}

    # Inside

    def _rank(self, sequence: Sequence, served: int) -> Rank:
        is_fair = self._order.is_fair
        return sequence.is_flex, _weighted(sequence.live.tenant, served) if is_fair else 0

    def _part(self, tenant: Tenant, tokens: int) -> int:
        """What service of one would be of each that is here, and of one who may come."""
        return _weighted(tenant, tokens) // (len(self.tenants) + 1)

    def _is_promised(self, sequence: Sequence) -> bool:
        return self._wait_ns_max > 0 and not sequence.is_flex

    def _insert(self, sequence: Sequence) -> None:
        tenant = sequence.live.tenant
        sequence.queue_key = (sequence.is_flex, *self._order.key(sequence))
        insort(tenant.queue, (sequence.queue_key, sequence), key=_key)
        if self._is_promised(sequence):
            insort(tenant.arrivals, _arrival(sequence))

    def _head_of(self, tenant: Tenant) -> Head:
        key, first = tenant.queue[0]
        return (self._rank(first, tenant.served), key, tenant)

    def _update(self, tenant: Tenant) -> None:
        """Something of the tenant has changed: whether it is throttled, or who is first in it."""
        tenant.tokens_max = tenant.tokens_max_asked or self._tokens_max
        head = self._head_of(tenant) if tenant.queue and not tenant.is_throttled else None
        if (tenant in self.throttled) != tenant.is_throttled:
            self.num_throttlings += 1
            if self.throttled.pop(tenant, tenant) is tenant:
                self.throttled[tenant] = None
        if head != tenant.head:
            tenant.head = head
            if head is not None:
                heapq.heappush(self._heap, head)
        if tenant.oldest is not None:
            del self._oldest[bisect_left(self._oldest, tenant.oldest)]
        tenant.oldest = tenant.arrivals[0] if head and tenant.arrivals else None
        if tenant.oldest is not None:
            insort(self._oldest, tenant.oldest)
        num_admissible = len(tenant.queue) if head is not None else 0
        self.num_admissible += num_admissible - tenant.num_admissible
        tenant.num_admissible = num_admissible
        if len(self._heap) > 2 * len(self.tenants) + 8:
            # Mostly heads that have moved on.
            self._heap = [t.head for t in self.tenants.values() if t.head is not None]
            heapq.heapify(self._heap)
        self.settle()

    def _merged(self, heap: list[Head], *, is_charged: bool) -> Iterator[Sequence]:
        """Queues merged by a heap of their heads, of which no more is looked at than is asked for;
        charged: all are current, and it is as if everybody was admitted as they come.
        """
        beyond = len(heap)
        # Heads whose parents were passed, by their place in the heap; and beyond it whoever is the
        # next of a tenant, by their place in the queue, with what those before it cost.
        near = [(*head, 0, 0, 0) for head in heap[:1]]
        while near:
            _, _, tenant, place, index, tokens = heapq.heappop(near)
            if place < beyond:
                for child in range(2 * place + 1, min(2 * place + 3, beyond)):
                    heapq.heappush(near, (*heap[child], child, 0, 0))
                is_there = is_charged or heap[place] is tenant.head
            else:
                yield (sequence := tenant.queue[index][1])
                if is_charged and sequence.state is State.WAITING:
                    tokens += len(sequence.tokens)
                index += 1
                is_there = index < len(tenant.queue)
            if is_there:
                key, after = tenant.queue[index]
                rank = self._rank(after, tenant.served + tokens)
                heapq.heappush(near, (rank, key, tenant, beyond, index, tokens))


def _weighted(tenant: Tenant, served: int) -> int:
    """What service counts, among tenants of other weights."""
    return served * WEIGHT_UNIT // tenant.weight


def _arrival(sequence: Sequence) -> Arrival:
    return (sequence.live.request.arrived_ns, sequence.sequence_id, sequence)
