"""Identifiers that sort by the time they were made: 48 bits of milliseconds and 80 random bits, in base 32 (ULID).

Within one process they ascend strictly, so a list ordered by id is a list in the order of creation.
"""

import secrets
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """`prefix`, an underscore and 26 characters, greater than every id this process made before."""
    global _last
    with _lock:
        fresh = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
        _last = fresh if fresh > _last else _last + 1
        value = _last
    return f"{prefix}_" + "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def new_secret() -> str:
    """The secret of one lease: 128 random bits."""
    return secrets.token_hex(16)
