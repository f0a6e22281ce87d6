"""Which rows share a shard: rows in order, packed up to the wanted bytes. Pure arithmetic."""

from layertap.layout import shard_bytes_estimate
from layertap.schemas.tasks import PlannedShard


class ShardPacker:
    """Takes row lengths one after the other and cuts shards of at most `shard_bytes`.

    `per_token` is what one token adds (`layertap.layout.token_bytes`). A row larger than `shard_bytes` is a shard of
    its own. The bytes are an upper bound of the file's size.
    """

    def __init__(self, per_token: int, shard_bytes: int) -> None:
        self._per_token = per_token
        self._shard_bytes = shard_bytes
        self._first_row = 0
        self._lengths: list[int] = []
        self._bytes = 0
        self._shards: list[PlannedShard] = []

    def add(self, tokens: int) -> None:
        """The next row, of `tokens` tokens."""
        grown = shard_bytes_estimate([tokens], self._per_token) - shard_bytes_estimate([], self._per_token)
        if self._lengths and self._bytes + grown > self._shard_bytes:
            self._cut()
        if not self._lengths:
            self._bytes = shard_bytes_estimate([], self._per_token)
        self._lengths.append(tokens)
        self._bytes += grown

    def finish(self) -> list[PlannedShard]:
        """Every shard, in order; together they hold every row once. To be called once, at the end."""
        if self._lengths:
            self._cut()
        return self._shards

    def _cut(self) -> None:
        rows = len(self._lengths)
        self._shards.append(
            PlannedShard(first_row=self._first_row, rows=rows, tokens=sum(self._lengths), bytes=self._bytes)
        )
        self._first_row += rows
        self._lengths = []
