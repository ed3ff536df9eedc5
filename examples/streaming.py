"""Data of unknown length: rows come in one by one, packed batches go out.

    python examples/streaming.py

Any iterable of rows will do, also a streamed `datasets.IterableDataset`. A pool of waiting rows fills the
bins; what waits in it is part of the loader's state, so a stream resumes without losing or repeating a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from multipack import DataLoader, PackedCollator, StreamPacker


class Endless:
    """Rows that nobody has counted; the same ones each time they are asked for."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        random = np.random.default_rng(0)
        while True:
            yield {"input_ids": random.integers(0, 256, random.integers(4, 400)).tolist()}


def loader() -> DataLoader[dict[str, object]]:
    packer = StreamPacker(Endless(), capacity=1024, pool_size=256)
    return DataLoader(packer, batch_size=None, collate_fn=PackedCollator())


def main() -> None:
    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(100)]
    state = first.state_dict()
    following = next(batches)
    print(
        f"{sum(batch['num_tokens'] for batch in seen) / (100 * 1024):.2%} of the slots of 100 bins are filled"
    )

    resumed = loader()
    resumed.load_state_dict(state)
    again = next(iter(resumed))
    assert again["input_ids"].equal(following["input_ids"])
    print("resumed with the batch that would have come next")


if __name__ == "__main__":
    main()
