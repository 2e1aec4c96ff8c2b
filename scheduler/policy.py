"""Who is served first: an order policy maps a request to a sort key.

Lower keys are admitted first and preempted last; equal keys keep the order of arrival.
An own policy is any object with these two methods.
"""

from typing import Protocol

from scheduler.request import Request, Sequence


class OrderPolicy(Protocol):
    def key(self, request: Request) -> float:
        """Called once when a request arrives."""
        ...

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """Called when a step computes `num_tokens` tokens of the sequence."""
        ...


class FirstComeFirstServed:
    """Arrival order."""

    def key(self, request: Request) -> float:
        return 0.0

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        pass


class ByPriority:
    """The request's `priority` field, lower first."""

    def key(self, request: Request) -> float:
        return float(request.priority)

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        pass


class ShortestFirst:
    """Shortest prompt first: lowest mean waiting time, at the price of starving the longest."""

    def key(self, request: Request) -> float:
        return float(len(request.prompt_token_ids))

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        pass


class FairByTenant:
    """Start-time fair queueing over tenants (Goyal, Vin and Cheng, 1996).

    A request starts, in virtual time, where its tenant's previous one ends or now, whichever is
    later; the cost of a request is its prompt and the output that it may produce.
    """

    def __init__(self):
        self._now = 0.0
        self._end_of_tenant: dict[str, float] = {}

    def key(self, request: Request) -> float:
        start = max(self._now, self._end_of_tenant.get(request.tenant, 0.0))
        self._end_of_tenant[request.tenant] = start + request.max_total_tokens
        if len(self._end_of_tenant) > 10_000:
            self._forget_idle_tenants()
        return start

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        self._now = max(self._now, sequence.request.order_key[0])

    def _forget_idle_tenants(self) -> None:
        ends = self._end_of_tenant
        self._end_of_tenant = {t: end for t, end in ends.items() if end > self._now}


ORDER_POLICIES: dict[str, type[OrderPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "shortest": ShortestFirst,
    "fair": FairByTenant,
}
