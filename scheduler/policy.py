"""Who is served first: an order policy maps a request to a sort key.

Lower keys are admitted first and preempted last; equal keys keep the order of arrival.
An own policy is any object with these three methods.
"""

from typing import Protocol

from scheduler.request import Request


class OrderPolicy(Protocol):
    def key(self, request: Request) -> float:
        """Called once when a request arrives."""
        ...

    def started(self, request: Request) -> None:
        """Called when one of its sequences starts to run, again after a preemption."""
        ...

    def ended(self, request: Request) -> None:
        """Called once when a request has ended, in whatever way."""
        ...


class FirstComeFirstServed:
    """Arrival order."""

    def key(self, request: Request) -> float:
        return 0.0

    def started(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class ByPriority:
    """The request's `priority` field, lower first."""

    def key(self, request: Request) -> float:
        return float(request.priority)

    def started(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class ShortestFirst:
    """Shortest prompt first: lowest mean waiting time, at the price of starving the longest."""

    def key(self, request: Request) -> float:
        return float(len(request.prompt_token_ids))

    def started(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class FairByTenant:
    """Start-time fair queueing over tenants (Goyal, Vin and Cheng, 1996).

    A request starts, in virtual time, where its tenant's previous one ends or now, whichever is
    later; the cost of a request is its prompt and the output that it may produce. When nobody
    waits, all tenants are even again.
    """

    def __init__(self):
        self._now = 0.0
        self._end_of_tenant: dict[str, float] = {}
        self._waiting: set[str] = set()

    def key(self, request: Request) -> float:
        if not self._waiting:
            self._now = max([self._now, *self._end_of_tenant.values()])
            self._end_of_tenant.clear()
        self._waiting.add(request.request_id)
        start = max(self._now, self._end_of_tenant.get(request.tenant, 0.0))
        self._end_of_tenant[request.tenant] = start + request.max_total_tokens
        return start

    def started(self, request: Request) -> None:
        self._waiting.discard(request.request_id)
        self._now = max(self._now, request.order_key[0])

    def ended(self, request: Request) -> None:
        self._waiting.discard(request.request_id)


ORDER_POLICIES: dict[str, type[OrderPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "shortest": ShortestFirst,
    "fair": FairByTenant,
}
