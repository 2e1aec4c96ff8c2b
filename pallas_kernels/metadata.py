"""The part of a batch that attention reads: a shape that the scheduler fills."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int


@runtime_checkable
class AttentionMetadata(Protocol):
    """Where the tokens of one step live in the pool, for each block group.

    The step's `T = D + C` tokens are one ragged list. The first `D` rows hold one token each
    (row i owns token i); rows `D..S-1` are prefill chunks, cut by `query_start_loc`.

    Padding: a token's slot is 0 (the null block); a row has `seq_lens` 0, and in the prefill
    part zero query length. The last value of `query_start_loc` is the end of the real tokens.
    """

    @property
    def slot_mapping(self) -> Int[Array, "G T"]:
        """`block_id * block_size + offset` of the slot that each token is written to."""

    @property
    def block_tables(self) -> Int[Array, "G S B"]:
        """Block ids of each row's tokens, in order; entries past the row's end are ignored."""

    @property
    def seq_lens(self) -> Int[Array, " S"]:
        """Keys that each row has, this step's tokens included."""

    @property
    def query_start_loc(self) -> Int[Array, " S_plus_1"]:
        """Prefix sums of the rows' query lengths."""

    @property
    def num_decodes(self) -> Int[Array, ""]:
        """Real one-token rows."""

    @property
    def num_seqs(self) -> Int[Array, ""]:
        """Real rows."""


class GroupMetadata(NamedTuple):
    """What a back end is given: `AttentionMetadata` of one block group, as JAX arrays."""

    slot_mapping: Int[Array, " T"]
    block_tables: Int[Array, "S B"]
    seq_lens: Int[Array, " S"]
    query_start_loc: Int[Array, " S_plus_1"]
    num_decodes: Int[Array, ""]
    num_seqs: Int[Array, ""]


def of_group(attn: AttentionMetadata, group: int) -> GroupMetadata:
    return GroupMetadata(
        slot_mapping=jnp.asarray(attn.slot_mapping[group]),
        block_tables=jnp.asarray(attn.block_tables[group]),
        seq_lens=jnp.asarray(attn.seq_lens),
        query_start_loc=jnp.asarray(attn.query_start_loc),
        num_decodes=jnp.asarray(attn.num_decodes),
        num_seqs=jnp.asarray(attn.num_seqs),
    )
