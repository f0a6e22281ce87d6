"""How much a worker has in hand at a time, where the operator leaves that to the device. Pure.

In flight: enough chunks that the engine always has the next one while the last are on their way to storage. Lanes:
while one shard prefills, others are laid out, flushed and hashed, which on a GPU takes longer than the prefill.
"""

MOST_LANES = 16
"""Shards that an operator may have in hand at a time."""
_INFLIGHT_CHUNKS = {"cpu": 4, "cuda": 8}
_LANES = {"cpu": 2, "cuda": 5}


def inflight_tokens(asked: int, chunk: int, device: str) -> int:
    """Tokens in the engine at a time: what was asked for, else a number of prefill chunks of `chunk` tokens."""
    return asked or _INFLIGHT_CHUNKS[device] * chunk


def shard_lanes(asked: int, device: str) -> int:
    """Shards in hand at a time."""
    return asked or _LANES[device]
