"""Reads a pulled job: numpy without torch, then a PyTorch DataLoader as a trainer would have it.

python examples/read_shards.py DIR
"""

import sys
from typing import Any

import layertap


def main(directory: str) -> None:
    rows = layertap.open(directory)
    rows.verify()
    print(rows)

    row = rows[0]
    print(row)
    for k in row.layers:
        print(f"boundary {k}: first token starts {row.boundary(k)[0, :3]}")

    try:
        from torch.utils.data import DataLoader
    except ImportError:
        print("torch is not installed; the numpy arrays above are all there is to it")
        return
    # One row a batch: rows differ in length, and how to pad them is the trainer's business.
    loader: Any = DataLoader(rows, batch_size=1, num_workers=2, collate_fn=to_torch)
    supervised = sum(int(tensors["loss_mask"].sum()) for tensors in loader)
    print(f"{supervised:,} supervised tokens in {len(rows)} rows")


def to_torch(batch: list[Any]) -> dict[str, Any]:
    """The tensors of the one row in the batch."""
    tensors: dict[str, Any] = batch[0].torch()
    return tensors


if __name__ == "__main__":
    main(*sys.argv[1:])
