"""The block pool: counts, the prefix index, the order of eviction, and books that tell faults."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from scheduler import BlockPool


def cached(pool: BlockPool, *digests: bytes) -> list[int]:
    """Fill blocks with these contents and give them back, in this order."""
    blocks = []
    for digest in digests:
        block = pool.allocate()
        pool.register(block, digest)
        blocks.append(block)
    pool.release(blocks)
    return blocks


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_beside_the_null_block(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks must be at least 2, got {num_blocks}"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("num_blocks", [2, 3, 17])
def test_every_block_but_the_null_block_is_handed_out_once(num_blocks):
    pool = BlockPool(num_blocks)
    assert pool.num_available == num_blocks - 1
    handed_out = [pool.allocate() for _ in range(num_blocks - 1)]
    assert sorted(handed_out) == list(range(1, num_blocks))
    assert pool.num_available == 0
    assert pool.num_referenced == num_blocks - 1
    with pytest.raises(KeyError):
        pool.allocate()
    pool.check_invariants(handed_out)


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.retain(block)
    assert pool.ref_counts[block] == 2
    pool.check_invariants([block, block])
    pool.release([block])
    assert pool.num_referenced == 1
    pool.check_invariants([block])
    pool.release([block])
    assert pool.num_referenced == 0
    assert pool.num_cached == 0, "nothing was registered"
    pool.check_invariants([])


def test_releasing_more_often_than_held_is_an_error():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} released more often than held"):
        pool.release([block])


def test_a_block_that_nobody_can_find_cannot_be_retained():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(KeyError):
        pool.retain(block)
    pool.check_invariants([])


def test_null_blocks_in_a_table_are_passed_over():
    pool = BlockPool(4)
    block = pool.allocate()
    pool.release([0, block, 0])
    assert pool.num_available == 3
    assert pool.ref_counts[0] == 0
    pool.check_invariants([0, 0])


def test_freed_content_stays_findable_until_its_block_is_reused():
    pool = BlockPool(3)
    (block,) = cached(pool, b"a")
    assert pool.lookup(b"a") == block
    assert pool.is_evictable(block)
    assert (pool.num_cached, pool.num_available) == (1, 2)
    assert pool.allocate() != block, "an empty block goes first"
    assert pool.lookup(b"a") == block
    assert pool.allocate() == block
    assert pool.lookup(b"a") is None
    assert not pool.is_evictable(block)


def test_a_block_is_findable_while_it_is_held():
    pool = BlockPool(3)
    block = pool.allocate()
    assert pool.lookup(b"a") is None
    pool.register(block, b"a")
    assert pool.lookup(b"a") == block
    assert not pool.is_evictable(block)
    assert pool.num_cached == 0


def test_retaining_a_cached_block_protects_it_from_eviction():
    pool = BlockPool(3)
    a, b = cached(pool, b"a", b"b")
    pool.retain(a)
    assert pool.num_available == 1
    assert pool.allocate() == b, "although `a` was cached before it"
    assert pool.lookup(b"a") == a
    with pytest.raises(KeyError):
        pool.allocate()
    pool.check_invariants([a, b])


def test_the_least_recently_released_content_is_evicted_first():
    pool = BlockPool(4)
    a, b, c = cached(pool, b"a", b"b", b"c")
    pool.retain(a)
    pool.release([a])  # a hit makes it the newest
    assert [pool.allocate() for _ in range(3)] == [b, c, a]


def test_the_leaves_of_a_prefix_are_evicted_before_its_root():
    pool = BlockPool(4)
    chain = [pool.allocate() for _ in range(3)]
    for block, digest in zip(chain, (b"root", b"middle", b"leaf"), strict=True):
        pool.register(block, digest)
    pool.release(reversed(chain))
    assert pool.allocate() == chain[2]
    assert pool.lookup(b"leaf") is None
    assert pool.lookup(b"root") == chain[0]
    assert pool.allocate() == chain[1]
    assert pool.lookup(b"root") == chain[0]


def test_the_first_block_of_a_content_keeps_it():
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.lookup(b"a") == first
    pool.release([second, first])
    assert pool.num_cached == 1, "the second is empty again"
    pool.check_invariants([])


def test_a_block_keeps_its_first_digest():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.register(block, b"a")
    pool.register(block, b"b")
    assert pool.lookup(b"a") == block
    assert pool.lookup(b"b") is None
    pool.check_invariants([block])


def test_evicted_content_can_be_cached_again_elsewhere():
    pool = BlockPool(3)
    cached(pool, b"a")
    held = [pool.allocate(), pool.allocate()]
    assert pool.lookup(b"a") is None
    pool.register(held[0], b"a")
    assert pool.lookup(b"a") == held[0]
    pool.check_invariants(held)


def test_forgetting_all_frees_what_is_cached_and_hides_what_is_held():
    pool = BlockPool(4)
    (unheld,) = cached(pool, b"a")
    held = pool.allocate()
    pool.register(held, b"b")
    pool.forget_all()
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") is None
    assert pool.num_cached == 0
    assert pool.num_available == 2
    assert not pool.is_evictable(unheld)
    pool.check_invariants([held])
    pool.release([held])
    assert pool.num_cached == 0, "its content is forgotten"
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]


# Faults planted from outside: the books must tell. Each is a bug that an allocator had somewhere.


def lose_a_block(pool: BlockPool) -> list[int]:
    pool._free.pop()
    return []


def hold_without_counting(pool: BlockPool) -> list[int]:
    return [pool.allocate(), 5]


def count_without_holding(pool: BlockPool) -> list[int]:
    pool.retain(pool.allocate())
    return [next(b for b, count in enumerate(pool.ref_counts) if count == 2)]


def free_a_block_twice(pool: BlockPool) -> list[int]:
    pool._free.append(pool._free[0])
    return []


def free_a_held_block(pool: BlockPool) -> list[int]:
    block = pool.allocate()
    pool._free.append(block)
    return [block]


def free_a_cached_block(pool: BlockPool) -> list[int]:
    pool._free.extend(cached(pool, b"a"))
    return []


def free_the_null_block(pool: BlockPool) -> list[int]:
    pool._free.append(0)
    return []


def keep_the_digest_of_a_freed_block(pool: BlockPool) -> list[int]:
    (block,) = cached(pool, b"a")
    del pool._evictable[block]
    pool._free.append(block)
    return []


def keep_a_digest_past_its_block(pool: BlockPool) -> list[int]:
    (block,) = cached(pool, b"a")
    del pool._digest_of_block[block]
    pool._digest_of_block[block] = b"b"
    return []


def cache_a_block_without_a_digest(pool: BlockPool) -> list[int]:
    block = pool._free.pop()
    pool._evictable[block] = None
    return []


def point_a_digest_at_another_block(pool: BlockPool) -> list[int]:
    cached(pool, b"a", b"b")
    pool._block_of_digest[b"a"] = pool._block_of_digest[b"b"]
    return []


def hold_a_negative_count(pool: BlockPool) -> list[int]:
    pool.ref_counts[3] = -1
    return []


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lose_a_block, "lost"),
        (hold_without_counting, "reference counts"),
        (count_without_holding, "reference counts"),
        (free_a_block_twice, "free twice"),
        (free_a_held_block, "handed out while held"),
        (free_a_cached_block, "free and evictable"),
        (free_the_null_block, "null block"),
        (keep_the_digest_of_a_freed_block, "still findable"),
        (keep_a_digest_past_its_block, "contradicts itself"),
        (cache_a_block_without_a_digest, "has no digest"),
        (point_a_digest_at_another_block, "contradicts itself"),
        (hold_a_negative_count, "reference counts"),
    ],
)
def test_the_books_tell_on(plant, message):
    pool = BlockPool(9)
    pool.check_invariants([])
    holders = plant(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants(holders)


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it that is slow and obvious."""

    held = Bundle("held")

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.counts = dict.fromkeys(range(1, num_blocks), 0)
        self.content: dict[int, bytes] = {}  # of held and cached blocks
        self.cached: list[int] = []  # unheld blocks with content, the next to be evicted first
        self.num_contents = 0

    @rule(target=held)
    def allocate(self):
        empty = {b for b, count in self.counts.items() if not count and b not in self.cached}
        if not empty and not self.cached:
            with pytest.raises(KeyError):
                self.pool.allocate()
            return multiple()
        block = self.pool.allocate()
        if empty:
            assert block in empty
        else:
            assert block == self.cached.pop(0)
            del self.content[block]
        self.counts[block] = 1
        return block

    @rule(target=held, block=held)
    def retain(self, block):
        self.pool.retain(block)
        self.counts[block] += 1
        return block

    @rule(blocks=st.lists(consumes(held), min_size=1, max_size=4))
    def release(self, blocks):
        self.pool.release(blocks)
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block] and block in self.content:
                self.cached.append(block)

    @rule(block=held)
    def register_new_content(self, block):
        self.num_contents += 1
        digest = b"%d" % self.num_contents
        self.pool.register(block, digest)
        if block not in self.content:
            self.content[block] = digest

    @precondition(lambda self: self.content)
    @rule(block=held, data=st.data())
    def register_content_that_is_there(self, block, data):
        digest = data.draw(st.sampled_from(sorted(self.content.values())))
        self.pool.register(block, digest)

    @precondition(lambda self: self.content)
    @rule(target=held, data=st.data())
    def hit(self, data):
        block, digest = data.draw(st.sampled_from(sorted(self.content.items())))
        assert self.pool.lookup(digest) == block
        self.pool.retain(block)
        self.counts[block] += 1
        if block in self.cached:
            self.cached.remove(block)
        return block

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.content.clear()
        self.cached.clear()

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_invariants(b for b, count in self.counts.items() for _ in range(count))
        assert pool.ref_counts == [0, *self.counts.values()]
        num_held = sum(count > 0 for count in self.counts.values())
        assert pool.num_referenced == num_held
        assert pool.num_available == self.num_blocks - 1 - num_held
        assert pool.num_cached == len(self.cached)
        assert {b for b in self.counts if pool.is_evictable(b)} == set(self.cached)
        found = {pool.lookup(b"%d" % i): b"%d" % i for i in range(1, self.num_contents + 1)}
        found.pop(None, None)
        assert found == self.content

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.pool.release(b for b, count in self.counts.items() for _ in range(count))
        self.pool.check_invariants([])
        everything = [self.pool.allocate() for _ in range(self.num_blocks - 1)]
        assert sorted(everything) == list(range(1, self.num_blocks))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
