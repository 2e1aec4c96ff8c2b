"""The queue of waiting sequences, against a sorted list."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import Request, SamplingParams, Sequence
from scheduler.waiting import WaitingQueue


def make_sequences(keys: list[float]) -> list[Sequence]:
    """Waiting sequences with these keys, in the order of their arrival."""
    sequences = []
    for arrival, key in enumerate(keys):
        request = Request(f"r{arrival}", [1], SamplingParams(), seed=0, max_total_tokens=2)
        request.order_key = (key, arrival)
        sequences += request.sequences
    return sequences


def drain(queue: WaitingQueue) -> list[Sequence]:
    return [queue.pop() for _ in range(len(queue))]


def test_an_empty_queue_has_no_head():
    queue = WaitingQueue()
    assert queue.peek() is None
    assert len(queue) == 0
    with pytest.raises(AssertionError, match="empty queue"):
        queue.pop()


def test_a_sequence_is_in_the_queue_at_most_once():
    queue = WaitingQueue()
    (sequence,) = make_sequences([0.0])
    queue.push(sequence)
    with pytest.raises(AssertionError):
        queue.push(sequence)


def test_equal_keys_keep_the_order_of_arrival():
    sequences = make_sequences([1.0, 0.0, 1.0, 0.0])
    queue = WaitingQueue()
    for sequence in reversed(sequences):
        queue.push(sequence)
    assert drain(queue) == [sequences[i] for i in (1, 3, 0, 2)]


def test_a_sequence_that_comes_back_takes_its_old_place():
    a, b, c = make_sequences([0.0, 0.0, 0.0])
    queue = WaitingQueue()
    for sequence in (a, b, c):
        queue.push(sequence)
    assert queue.pop() is a
    queue.remove(b)
    queue.push(a)
    queue.push(b)
    assert drain(queue) == [a, b, c]
    assert queue.peek() is None


def test_removing_what_is_not_there_changes_nothing():
    a, b = make_sequences([0.0, 0.0])
    queue = WaitingQueue()
    queue.push(a)
    queue.remove(b)
    assert drain(queue) == [a]


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "peek"]), st.integers(0, 9))),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=10, max_size=10),
)
def test_it_behaves_like_a_sorted_list(operations, keys):
    sequences = make_sequences(keys)
    queue, model = WaitingQueue(), []
    for name, i in operations:
        sequence = sequences[i]
        head = min(model, key=lambda s: s.request.order_key, default=None)
        if name == "push" and sequence not in model:
            queue.push(sequence)
            model.append(sequence)
        elif name == "remove":
            queue.remove(sequence)
            model = [s for s in model if s is not sequence]
        elif name == "pop" and model:
            assert queue.pop() is head
            model.remove(head)
        elif name == "peek":
            assert queue.peek() is head
        assert len(queue) == len(model)
        assert set(queue) == set(model)
        assert (sequence in queue) == (sequence in model)
    assert drain(queue) == sorted(model, key=lambda s: s.request.order_key)


def test_many_removals_leave_no_memory_behind():
    """Sequences that were removed are let go, even if they never come to the front."""
    rng = random.Random(1)
    sequences = make_sequences([float(rng.randrange(100)) for _ in range(3000)])
    queue = WaitingQueue()
    front = min(sequences, key=lambda s: s.request.order_key)
    queue.push(front)
    for sequence in sequences:
        if sequence is not front:
            queue.push(sequence)
            queue.remove(sequence)
    assert list(queue) == [front]
    assert len(queue._heap) <= 65
    assert queue.pop() is front


def test_a_queue_whose_head_comes_and_goes_stays_small():
    """A sequence that is parked and woken time and again leaves one entry, not many."""
    sequences = make_sequences([0.0] * 4)
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
    for _ in range(2000):
        queue.remove(sequences[2])
        queue.push(sequences[2])
    assert len(queue) == 4
    assert len(queue._heap) <= 200
    assert drain(queue) == sequences
