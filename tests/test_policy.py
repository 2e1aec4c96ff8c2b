"""Who is served first: the order policies, and one of a test's own."""

import random
import time

import pytest

from scheduler import ORDER_POLICIES, Status
from tests.fakes import FakeEngine
from tests.scheduling import (
    assert_right,
    checked_step,
    finish_all,
    first_step_of,
    greedy,
    make_config,
    make_engine,
    prompt,
    step_until,
)

both_lags = pytest.mark.parametrize("lag", [0, 1])


def one_at_a_time(order, *, lag: int = 0) -> FakeEngine:
    """An engine with one row: requests run in the very order of the policy."""
    return make_engine(make_config(num_usable=60, max_num_seqs=1), lag=lag, order=order)


def served_order(engine: FakeEngine) -> list[str]:
    finish_all(engine, max_steps=20_000)
    return [request_id for request_id, _ in engine.finished]


def test_the_policies_have_the_names_of_the_option():
    assert set(ORDER_POLICIES) == {"fcfs", "priority", "shortest", "fair"}


@pytest.mark.parametrize("name", ORDER_POLICIES)
@both_lags
def test_every_policy_serves_everybody_and_rightly(name, lag):
    rng = random.Random(name)
    engine = make_engine(make_config(num_usable=14), lag=lag, order=ORDER_POLICIES[name]())
    requests = []
    for i in range(60):
        params = greedy(rng.randrange(1, 12), n=rng.choice([1, 1, 3]))
        requests.append(
            engine.add(
                f"r{i}",
                prompt(rng.randrange(1, 40), first=i % 5),
                params,
                priority=rng.randrange(-2, 3),
                tenant=rng.choice("ab"),
            )
        )
        for _ in range(rng.randrange(3)):
            checked_step(engine)
    finish_all(engine)
    assert engine.scheduler.num_preemptions > 0
    assert_right(engine, *requests)


@both_lags
def test_first_come_first_served(lag):
    engine = one_at_a_time(ORDER_POLICIES["fcfs"](), lag=lag)
    for i in range(8):
        engine.add(f"r{i}", prompt(9 - i, first=i), greedy(2), priority=-i)
    assert served_order(engine) == [f"r{i}" for i in range(8)]


def test_no_policy_means_first_come_first_served():
    engine = one_at_a_time(None)
    for i in range(4):
        engine.add(f"r{i}", prompt(9 - i, first=i), greedy(2), priority=-i)
    assert served_order(engine) == [f"r{i}" for i in range(4)]


@both_lags
def test_priority_puts_lower_numbers_first_and_keeps_the_order_of_equals(lag):
    engine = one_at_a_time(ORDER_POLICIES["priority"](), lag=lag)
    priorities = [0, 5, -3, 0, 5, -3, 2]
    for i, priority in enumerate(priorities):
        engine.add(f"r{i}", prompt(5, first=i), greedy(2), priority=priority)
    expected = sorted(range(len(priorities)), key=lambda i: (priorities[i], i))
    assert served_order(engine) == [f"r{i}" for i in expected]


@both_lags
def test_the_lowest_priority_is_preempted_though_it_is_the_oldest(lag):
    engine = make_engine(make_config(num_usable=10), lag=lag, order=ORDER_POLICIES["priority"]())
    requests = [engine.add(f"r{i}", prompt(8, first=i), greedy(20), priority=-i) for i in range(3)]
    checked_step(engine)
    assert len(engine.scheduler.running) == 3
    finish_all(engine)
    victims = [s.request.request_id for output in engine.outputs for s in output.preempted]
    assert victims[0] == "r0"
    assert "r2" not in victims
    assert [request_id for request_id, _ in engine.finished] == ["r2", "r1", "r0"]
    assert_right(engine, *requests)


@both_lags
def test_a_later_request_of_higher_priority_takes_the_next_row(lag):
    engine = make_engine(
        make_config(num_usable=60, max_num_seqs=2), lag=lag, order=ORDER_POLICIES["priority"]()
    )
    for i in range(6):
        engine.add(f"r{i}", prompt(5, first=i), greedy(6))
    checked_step(engine)
    urgent = engine.add("urgent", prompt(5, first=9), greedy(6), priority=-1)
    step_until(engine, lambda: urgent.sequences[0].status is Status.RUNNING, max_steps=8)
    assert len(engine.finished) == 2
    finish_all(engine)


@both_lags
def test_shortest_prompt_first(lag):
    engine = one_at_a_time(ORDER_POLICIES["shortest"](), lag=lag)
    lengths = [9, 3, 30, 1, 3, 12]
    for i, length in enumerate(lengths):
        engine.add(f"r{i}", prompt(length, first=i), greedy(2))
    expected = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    assert served_order(engine) == [f"r{i}" for i in expected]


def test_shortest_first_lowers_the_mean_wait():
    waits = {}
    for name in ("fcfs", "shortest"):
        config = make_config(num_usable=60, max_num_seqs=1, max_num_batched_tokens=4)
        engine = make_engine(config, order=ORDER_POLICIES[name]())
        requests = [engine.add(f"r{i}", prompt(40 - i, first=i), greedy(1)) for i in range(39)]
        finish_all(engine)
        waits[name] = sum(first_step_of(engine, request) for request in requests)
    assert waits["shortest"] < 0.8 * waits["fcfs"]


@both_lags
def test_a_tenant_with_many_requests_does_not_starve_another(lag):
    engine = one_at_a_time(ORDER_POLICIES["fair"](), lag=lag)
    for i in range(40):
        engine.add(f"many{i}", prompt(8, first=i), greedy(4), tenant="many")
    for i in range(4):
        engine.add(f"few{i}", prompt(8, first=100 + i), greedy(4), tenant="few")
    order = served_order(engine)
    places = [order.index(f"few{i}") for i in range(4)]
    assert places == [1, 3, 5, 7], "in turn with the tenant that came first"


@both_lags
def test_a_tenant_that_comes_late_neither_waits_for_all_nor_has_saved_up(lag):
    engine = one_at_a_time(ORDER_POLICIES["fair"](), lag=lag)
    for i in range(40):
        engine.add(f"many{i}", prompt(8, first=i), greedy(4), tenant="many")
    step_until(engine, lambda: len(engine.finished) == 20)
    for i in range(10):
        engine.add(f"late{i}", prompt(8, first=100 + i), greedy(4), tenant="late")
    order = served_order(engine)
    late = [place for place, request_id in enumerate(order) if request_id.startswith("late")]
    assert late[0] <= 22, "it need not wait for the forty"
    assert late[-1] >= 38, "and it does not make up for the time before it came"


@both_lags
def test_fairness_weighs_tokens_not_requests(lag):
    """A tenant's long requests count for more than another's short ones."""
    engine = one_at_a_time(ORDER_POLICIES["fair"](), lag=lag)
    for i in range(10):
        engine.add(f"long{i}", prompt(36, first=i), greedy(4), tenant="long")
        engine.add(f"short{i}", prompt(6, first=100 + i), greedy(4), tenant="short")
    order = served_order(engine)
    first_long, second_long = order.index("long0"), order.index("long1")
    between = order[first_long + 1 : second_long]
    assert len(between) >= 4
    assert all(request_id.startswith("short") for request_id in between)


def test_requests_of_one_tenant_keep_their_order():
    engine = one_at_a_time(ORDER_POLICIES["fair"]())
    for i in range(10):
        engine.add(f"r{i}", prompt(20 - i, first=i), greedy(2), tenant="one")
    assert served_order(engine) == [f"r{i}" for i in range(10)]


class ShortestNameFirst:
    """An own policy in a few lines: by the length of the tenant's name."""

    def __init__(self):
        self.heard: list[tuple[str, str]] = []

    def key(self, request) -> float:
        return len(request.tenant)

    def started(self, request) -> None:
        self.heard.append(("started", request.request_id))

    def ended(self, request) -> None:
        self.heard.append(("ended", request.request_id))


@both_lags
def test_an_own_policy_is_an_object_with_three_methods(lag):
    order = ShortestNameFirst()
    engine = one_at_a_time(order, lag=lag)
    for i, tenant in enumerate(["cc", "a", "bbb", "", "a"]):
        engine.add(f"r{i}", prompt(5, first=i), greedy(2), tenant=tenant)
    assert served_order(engine) == ["r3", "r1", "r4", "r0", "r2"]
    for event in ("started", "ended"):
        assert [r for e, r in order.heard if e == event] == ["r3", "r1", "r4", "r0", "r2"]


@both_lags
def test_after_an_idle_time_nobody_owes_anything(lag):
    """Start-time fair queueing: at the end of a busy period virtual time is the last end."""
    engine = make_engine(
        make_config(num_usable=60, max_num_seqs=1), lag=lag, order=ORDER_POLICIES["fair"]()
    )
    engine.add("regular0", prompt(8, first=1), greedy(4), tenant="regular")
    finish_all(engine)
    engine.add("regular1", prompt(8, first=2), greedy(4), tenant="regular")
    for i in range(30):
        engine.add(f"fresh{i}", prompt(8, first=10 + i), greedy(4), tenant=f"fresh{i}")
    finish_all(engine)
    order = [request_id for request_id, _ in engine.finished]
    assert order.index("regular1") <= 2, order


def test_tenants_that_were_served_are_forgotten_and_adding_stays_quick():
    order = ORDER_POLICIES["fair"]()
    engine = FakeEngine(make_config(num_usable=60, max_num_seqs=4), order=order)
    for i in range(14_000):
        engine.add(f"r{i}", [1], greedy(1), tenant=f"user{i}")
        engine.step()
    while engine.scheduler.has_unfinished or engine.pending:
        engine.step()
    assert len(order._end_of_tenant) <= 10_001
    before = time.process_time()
    for i in range(100):
        engine.add(f"s{i}", [1], greedy(1), tenant=f"new{i}")
    assert time.process_time() - before < 0.02, time.process_time() - before
