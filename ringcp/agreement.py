"""Agreement: before anything is sent, the ranks of a group vote on the call that they are about to make.

A vote is a few integers a rank, on a host channel: never NCCL. Words are exchanged only after a bad vote; then every
rank raises and names the odd one, and the next valid call works. A rank that refuses its arguments still votes, so that
its peers raise too instead of waiting.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from torch import Tensor

from ringcp.channels import Channel
from ringcp.errors import AgreementError, PeerError, RingcpError
from ringcp.groups import GroupState

_WORDS_BYTES = 16384
_VOTE_TAG, _WORDS_TAG = 1 << 30, (1 << 30) + 1


class Told(NamedTuple):
    """What a rank tells the others: local lengths of queries, and of keys and values; the seed that it drew; whether it
    can keep what an exchange brings; the last two dims of its attn_mask.
    """

    q: int
    kv: int
    seed: int = 0
    keep: bool = False
    mask_rows: int = -1
    mask_keys: int = -1


_VOTE = Struct(f"={3 + len(Told._fields)}q")


class Vote(NamedTuple):
    """What one rank says: a hash of what must be equal, its call number, what it tells, and whether it refuses."""

    signature: int
    call: int
    told: Told
    refused: bool

    def encoded(self) -> bytes:
        return _VOTE.pack(self.signature, self.call, *self.told, self.refused)

    @classmethod
    def decoded(cls, message: bytes) -> Vote:
        signature, call, *told, refused = _VOTE.unpack(message)
        return cls(signature, call, Told(*told), bool(refused))


def signature(description: str) -> int:
    """A 63-bit hash (blake2b) of the canonical description of a call."""
    return int.from_bytes(blake2b(description.encode(), digest_size=8).digest(), "big") >> 1


def slopes_text(slopes: Tensor | None) -> str:
    """Slopes of ALiBi as words of a vote: their shape; and of what lies on the host, the values."""
    # What lies on a GPU is not read: that would wait for it.
    if slopes is None or slopes.device.type != "cpu":
        return str(slopes if slopes is None else tuple(slopes.shape))
    return f"{tuple(slopes.shape)} with signature {signature(repr(slopes.tolist()))} of their values"


def agree(
    state: GroupState,
    call: int,
    words: str,
    told: Told,
    refusal: RingcpError | None,
    timeout: float | None,
) -> list[Told]:
    """Vote on one call; what all ranks tell. A group of one does not vote.

    words: everything that must be equal on all ranks, as "name=value; name=value".
    refusal: why this rank cannot make the call, if it cannot.

    Raises:
        AgreementError: on every rank, if the calls differ or another rank refuses; the odd ranks are named.
        PeerError: if a rank does not come in time. The group is broken then.
        RingcpError: `refusal`, after the vote.
    """
    if state.channel is None:
        if refusal is not None:
            raise refusal
        return [told]
    mine = Vote(signature(words), call, told, refusal is not None)
    try:
        received = state.channel.exchange(mine.encoded(), _VOTE_TAG, timeout)
        votes = [Vote.decoded(message) for message in received]
        if not any(vote.refused for vote in votes) and len({vote[:2] for vote in votes}) == 1:
            return [vote.told for vote in votes]
        said = _exchange_words(state.channel, str(refusal) if refusal is not None else words, timeout)
    except BaseException as error:
        state.break_off(error)
        if isinstance(error, PeerError) and refusal is not None:
            raise refusal from error
        raise
    # The call numbers may have drifted apart: all ranks go on from the highest.
    state.calls = max(vote.call for vote in votes)
    if refusal is not None:
        raise refusal
    raise AgreementError(f"rank {state.rank}: {_verdict(votes, said)}. Nothing was sent.")


def _exchange_words(channel: Channel, words: str, timeout: float | None) -> list[str]:
    data = words.encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES, b"\0")
    received = channel.exchange(data, _WORDS_TAG, timeout)
    return [text.rstrip(b"\0").decode(errors="replace") for text in received]


def _verdict(votes: list[Vote], said: list[str]) -> str:
    refused = [f"rank {rank} refused its arguments ({said[rank]})" for rank, vote in enumerate(votes) if vote.refused]
    if refused:
        return "; ".join(refused)
    ballots = [(vote.signature, vote.call) for vote in votes]
    usual = Counter(ballots).most_common(1)[0][0]
    reference = ballots.index(usual)
    return "; ".join(
        f"rank {rank} made a different call than rank {reference}: "
        + _difference(said[rank], said[reference], votes[rank].call, votes[reference].call)
        for rank, ballot in enumerate(ballots)
        if ballot != usual
    )


def _difference(odd: str, usual: str, odd_call: int, usual_call: int) -> str:
    ours, theirs = (dict(pair.split("=", 1) for pair in words.split("; ") if "=" in pair) for words in (odd, usual))
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if "call" in names:  # other functions have other arguments
        names = ["call"]
    different = [f"{name}={ours[name]}, not {name}={theirs[name]}" for name in names]
    if odd_call != usual_call:
        different.append(f"its call number {odd_call}, not {usual_call}")
    return ", ".join(different) or "descriptions too long to compare"
