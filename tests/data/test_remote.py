"""Shards in a store: rows of every format, what is fetched and kept, and stores that fail."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import pickle
import re
import threading
import time

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs, ipc, parquet

from multipack import PackedCollator
from multipack.data.block_cache import BlockCache, OwnFolder
from multipack.data.dataset import TokenDataset
from multipack.data.remote import remote

NUM_SHARDS, SHARD_ROWS, BLOCK_ROWS = 3, 40, 8


def example_rows():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, NUM_SHARDS * SHARD_ROWS)
    return [
        {
            "input_ids": rng.integers(0, 1000, length).tolist(),
            "labels": rng.integers(0, 9, length).tolist(),
            "kind": f"k{i % 4}",
            "length": int(length),
        }
        for i, length in enumerate(lengths)
    ]


ROWS = example_rows()
SHARDS = [ROWS[i * SHARD_ROWS : (i + 1) * SHARD_ROWS] for i in range(NUM_SHARDS)]


def write_parquet(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=BLOCK_ROWS)


def write_arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, BLOCK_ROWS)


def write_stream(path, rows):
    table = pa.Table.from_pylist(rows)
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, BLOCK_ROWS)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_gzip(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


FORMATS = {
    "parquet": (".parquet", write_parquet, BLOCK_ROWS),
    "arrow": (".arrow", write_arrow, BLOCK_ROWS),
    "stream": (".arrow", write_stream, SHARD_ROWS),
    "jsonl": (".jsonl", write_jsonl, SHARD_ROWS),
    "gzip": (".jsonl.gz", write_gzip, SHARD_ROWS),
}


def write_shards(folder, form):
    suffix, write, _ = FORMATS[form]
    folder.mkdir()
    for i, rows in enumerate(SHARDS):
        write(folder / f"part-{i}{suffix}", rows)
    return folder


@pytest.fixture(params=FORMATS)
def shards(request, tmp_path):
    return write_shards(tmp_path / "data", request.param), request.param


@pytest.fixture
def parquet_shards(tmp_path):
    return write_shards(tmp_path / "data", "parquet")


def open_shards(folder, tmp_path, **arguments):
    columns = arguments.pop("columns", ["labels", "kind"])
    arguments = {"cache_dir": tmp_path / "cache"} | arguments
    return TokenDataset(remote(str(folder), **arguments), columns=columns)


def values(dataset, rows=None):
    found = [dataset[i] for i in (range(len(dataset)) if rows is None else rows)]
    return [
        {name: value if isinstance(value, str) else value.tolist() for name, value in row.items()}
        for row in found
    ]


def without(rows, *names):
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


# Rows.


def test_rows_of_every_format(shards, tmp_path):
    folder, form = shards
    dataset = open_shards(folder, tmp_path)
    assert dataset.lengths.tolist() == [row["length"] for row in ROWS]
    assert dataset.columns == ("input_ids", "labels", "kind")
    assert values(dataset) == without(ROWS, "length")
    assert dataset.elsewhere.shuffle_block == FORMATS[form][2]


def test_batches_are_those_of_the_rows_in_memory(shards, tmp_path):
    dataset, collate = open_shards(shards[0], tmp_path, columns=None), PackedCollator(return_indices=True)
    here = TokenDataset(pa.Table.from_pylist(ROWS))
    for ids in ([5, 3, 119, 60, 3], [0], list(range(120))):
        expected, found = (collate(source.__getitems__(ids)) for source in (here, dataset))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert value.equal(found[name]) if hasattr(value, "equal") else value == found[name], name


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_column_of_lengths_or_the_tokens_themselves(tmp_path, caplog, form):
    folder = write_shards(tmp_path / "data", form)
    with caplog.at_level(logging.WARNING):
        first = open_shards(folder, tmp_path).lengths
    assert "does not tell the lengths of lists, so its column 'input_ids' is read once" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):  # kept beside the cache
        assert open_shards(folder, tmp_path).lengths.tolist() == first.tolist()
        if form == "parquet":
            told = open_shards(folder, tmp_path, lengths="length", cache_dir=tmp_path / "other").lengths
            assert told.tolist() == first.tolist()
    assert caplog.text == ""


def test_lengths_that_lie_are_found_when_their_block_comes(tmp_path):
    rows = [dict(row) for row in ROWS]
    rows[21]["length"] += 1  # block 2, its row 5
    write_parquet(tmp_path / "a.parquet", rows)
    dataset = open_shards(tmp_path / "a.parquet", tmp_path, lengths="length")
    assert values(dataset, [0]) == without(ROWS[:1], "length")
    with pytest.raises(
        ValueError, match=r"a\.parquet, block 2: row 5 of 8 has another length than length told"
    ):
        values(dataset, [20])


def test_patterns_lists_and_other_file_systems(tmp_path, parquet_shards):
    for urls in (
        f"{parquet_shards}/*.parquet",
        [str(parquet_shards / f"part-{i}.parquet") for i in range(3)],
        f"file://{parquet_shards}",
    ):
        dataset = TokenDataset(remote(urls, cache_dir=tmp_path / "cache"), columns=["labels", "kind"])
        assert values(dataset, [0, 119]) == without([ROWS[0], ROWS[119]], "length")
    memory = fsspec.filesystem("memory")
    memory.makedirs("/train", exist_ok=True)
    for path in parquet_shards.iterdir():
        memory.pipe(f"/train/{path.name}", path.read_bytes())
    dataset = TokenDataset(
        remote("memory://train/*", cache_dir=tmp_path / "cache"), columns=["labels", "kind"]
    )
    assert values(dataset, [0, 119]) == without([ROWS[0], ROWS[119]], "length")
    copy = pickle.loads(pickle.dumps(dataset))
    assert values(copy, [60]) == without([ROWS[60]], "length")


def test_over_long_rows_are_split_as_in_memory(tmp_path, parquet_shards):
    source = remote(str(parquet_shards), lengths="length", cache_dir=tmp_path / "cache")
    dataset = TokenDataset(source, columns=[], max_length=7, overlong="split")
    here = TokenDataset(
        pa.Table.from_pylist(without(ROWS, "labels", "kind", "length")), max_length=7, overlong="split"
    )
    assert values(dataset) == values(here)


# The cache.


def test_blocks_are_fetched_once_and_found_again_after_a_restart(tmp_path, parquet_shards):
    dataset = open_shards(parquet_shards, tmp_path, lengths="length")
    assert values(dataset) == values(dataset)
    assert dataset.elsewhere.traffic.blocks_fetched == 15
    folder = next((tmp_path / "cache").glob("process-*"))
    (folder / "half.1.part").write_bytes(b"x")
    damaged = min(folder.glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-3] + b"abc")
    dataset.elsewhere.close()
    again = open_shards(parquet_shards, tmp_path, lengths="length")
    assert values(again) == without(ROWS, "length")
    traffic = again.elsewhere.traffic
    assert (traffic.blocks_found, traffic.blocks_fetched) == (14, 1)
    assert list(folder.glob("*.part")) == []


def test_two_processes_have_folders_of_their_own(tmp_path):
    first, second = OwnFolder(tmp_path), OwnFolder(tmp_path)
    assert first.path != second.path
    path = first.path
    first.close()
    assert OwnFolder(tmp_path).path == path
    second.close()


def test_what_is_needed_last_is_evicted(tmp_path):
    # Blocks of equal size, of which three fit.
    rows = [{"input_ids": [i] * 5, "length": 5} for i in range(4 * BLOCK_ROWS)]
    write_parquet(tmp_path / "a.parquet", rows)
    whole = open_shards(tmp_path / "a.parquet", tmp_path, lengths="length", columns=[])
    values(whole)
    (size,) = {path.stat().st_size for path in (tmp_path / "cache").glob("process-*/*.arrow")}
    whole.elsewhere.close()
    small = open_shards(
        tmp_path / "a.parquet",
        tmp_path,
        lengths="length",
        columns=[],
        cache_dir=tmp_path / "s",
        cache_bytes=3 * size,
    )
    # A row of blocks 0 1 2 3 0 1 0: when 3 comes, 2 is needed never again.
    batches = [[block * BLOCK_ROWS] for block in (0, 1, 2, 3, 0, 1, 0)]
    for ids in small.elsewhere.read_ahead(iter(batches), lambda ids: np.array(ids)):
        assert small[ids[0]]["input_ids"].tolist() == [ids[0]] * 5
        used = sum(path.stat().st_size for path in (tmp_path / "s").glob("process-*/*.arrow"))
        assert used <= 3 * size
    assert small.elsewhere.traffic.blocks_fetched == 4
    small.elsewhere.close()


def test_blocks_come_before_they_are_asked_for(tmp_path, parquet_shards):
    dataset = open_shards(parquet_shards, tmp_path, lengths="length", columns=[])
    rows = dataset.elsewhere
    ahead = rows.read_ahead(iter([[0], [50], [100]]), lambda ids: np.array(ids))
    assert next(ahead) == [0]  # all three were announced
    deadline = time.monotonic() + 20
    while rows.traffic.blocks_fetched < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rows.traffic.blocks_fetched == 3
    assert [dataset[i]["input_ids"].tolist() for i in (0, 50, 100)] == [
        ROWS[i]["input_ids"] for i in (0, 50, 100)
    ]
    assert rows.traffic.blocks_waited_for == 0
    assert rows.traffic.blocks_fetched == 3
    rows.close()


def test_a_cache_smaller_than_a_block_still_gives_right_rows(tmp_path, parquet_shards):
    dataset = open_shards(parquet_shards, tmp_path, cache_bytes=1)
    assert values(dataset) == without(ROWS, "length")
    assert len(list((tmp_path / "cache").glob("process-*/*.arrow"))) <= 1


# Bad input: one line that names the URL, and nothing half-cached.


def test_missing_and_unknown_objects(tmp_path, parquet_shards):
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet"):
        remote(str(tmp_path / "nothing.parquet"))
    (tmp_path / "part.txt").write_text("x")
    with pytest.raises(ValueError, match=r"part\.txt has none of the suffixes"):
        remote(str(tmp_path / "part.txt"))
    with pytest.raises(ValueError, match="two file systems"):
        remote(["s3://a/b.parquet", "gs://a/b.parquet"])
    with pytest.raises(ValueError, match="no URL is given"):
        remote([])
    with pytest.raises(ValueError, match=r"part-0\.parquet has no column 'text'; it has \['input_ids'"):
        open_shards(parquet_shards, tmp_path, columns=["text"])
    with pytest.raises(ValueError, match="format 'csv' is none of"):
        remote(str(parquet_shards), format="csv")


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream", "gzip"])
def test_truncated_shards_are_named(tmp_path, form):
    suffix, write, _ = FORMATS[form]
    path = tmp_path / f"a{suffix}"
    write(path, ROWS)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=re.escape(f"a{suffix} cannot be read")):
        values(open_shards(path, tmp_path))
    assert list((tmp_path / "cache").glob("**/*.arrow")) == []


def test_shards_with_other_columns_are_refused(tmp_path, parquet_shards):
    write_parquet(parquet_shards / "part-9.parquet", without(ROWS[:3], "labels"))
    with pytest.raises(
        ValueError, match=r"part-9\.parquet has the columns input_ids .* but .*part-0\.parquet"
    ):
        open_shards(parquet_shards, tmp_path)


def test_a_changed_object_is_an_error(tmp_path, parquet_shards):
    dataset = open_shards(parquet_shards, tmp_path, lengths="length")
    values(dataset, [0])
    write_parquet(parquet_shards / "part-1.parquet", ROWS[:SHARD_ROWS])
    values(dataset, [1])
    with pytest.raises(ValueError, match=r"part-1\.parquet has changed since it was opened first"):
        values(dataset, [SHARD_ROWS])
    (parquet_shards / "part-2.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-2\.parquet: the object is gone"):
        values(dataset, [2 * SHARD_ROWS])


def test_rows_that_are_wrong_are_named_with_their_shard(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"input_ids": [1, None], "length": 2}])
    with pytest.raises(ValueError, match=r"a\.parquet: .*null"):
        open_shards(tmp_path / "a.parquet", tmp_path, columns=[])


# A real protocol.


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("moto")
    from object_server import object_server

    with object_server() as (direct, connection, faults):
        direct.create_dir("bucket")
        for i, rows in enumerate(SHARDS):
            table = pa.Table.from_pylist(rows)
            parquet.write_table(
                table, f"bucket/train/part-{i}.parquet", filesystem=direct, row_group_size=BLOCK_ROWS
            )
        yield direct, connection, faults


@pytest.fixture
def s3_rows(bucket, tmp_path):
    direct, connection, faults = bucket
    faults.every, faults.first_byte, faults.cut_until, faults.forbidden = 0, 0.0, 0.0, False

    def open_rows(**arguments):
        arguments = dict(filesystem=connection, lengths="length", cache_dir=tmp_path / "cache") | arguments
        return TokenDataset(remote("s3://bucket/train/*.parquet", **arguments), columns=["labels", "kind"])

    yield open_rows, faults, direct
    faults.every, faults.first_byte, faults.cut_until, faults.forbidden = 0, 0.0, 0.0, False


def test_rows_from_s3(s3_rows):
    open_rows, _, _ = s3_rows
    dataset = open_rows()
    assert values(dataset) == without(ROWS, "length")
    assert values(pickle.loads(pickle.dumps(dataset)), [7]) == without([ROWS[7]], "length")


def test_one_request_in_ten_is_refused_and_nothing_is_lost(s3_rows):
    open_rows, faults, _ = s3_rows
    faults.every, faults.refused = 10, 0
    assert values(open_rows()) == without(ROWS, "length")
    assert faults.refused >= 3


def test_a_lost_connection_is_tried_again(s3_rows):
    open_rows, faults, _ = s3_rows
    dataset = open_rows()
    faults.cut_until = time.monotonic() + 3
    assert values(dataset) == without(ROWS, "length")


def test_a_connection_that_stays_lost_is_an_error(s3_rows):
    open_rows, faults, _ = s3_rows
    dataset = open_rows(patience=0.5)
    faults.cut_until = time.monotonic() + 60
    with pytest.raises(
        ConnectionError, match=r"s3://bucket/train/part-0\.parquet could not be read for 0\.5 s"
    ):
        values(dataset, [0])
    faults.cut_until = 0.0
    assert values(dataset, [0]) == without(ROWS[:1], "length")


def test_refused_credentials_are_an_error_at_once(s3_rows):
    open_rows, faults, _ = s3_rows
    dataset = open_rows()
    faults.forbidden = True
    start = time.monotonic()
    with pytest.raises(PermissionError, match=r"s3://bucket/train/part-0\.parquet: the store refuses"):
        values(dataset, [0])
    with pytest.raises(PermissionError, match=r"s3://bucket/train/\*\.parquet: the store refuses"):
        open_rows()
    assert time.monotonic() - start < 20


def test_missing_buckets_and_objects(s3_rows, bucket):
    _, connection, _ = bucket
    for url in ("s3://nowhere/a.parquet", "s3://bucket/nothing.parquet"):
        with pytest.raises(FileNotFoundError, match=re.escape(url)):
            remote(url, filesystem=connection)


def test_lengths_of_arrow_files_need_no_values(s3_rows, tmp_path, bucket):
    _, faults, direct = s3_rows
    rng = np.random.default_rng(0)
    rows = pa.array([rng.integers(0, 1000, 2000) for _ in range(200)], pa.list_(pa.int32()))
    table = pa.table({"input_ids": rows})
    with direct.open_output_stream("bucket/big.arrow") as file, ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 50)
    size = direct.get_file_info("bucket/big.arrow").size
    before = faults.bytes
    dataset = TokenDataset(remote("s3://bucket/big.arrow", filesystem=bucket[1], cache_dir=tmp_path / "c"))
    assert dataset.report.num_tokens == 400_000
    assert faults.bytes - before < size / 5
    assert dataset[150]["input_ids"].tolist() == rows[150].as_py()
    assert faults.bytes - before < size / 2  # one block of four


def test_the_file_system_of_arrow_is_found_by_the_url():
    store = remote.__globals__["store_of"](["s3://bucket/a.parquet?region=us-east-1"], None, 1.0)[0]
    assert isinstance(store.filesystem, fs.S3FileSystem)


def test_a_cache_that_is_dropped_ends_its_threads(tmp_path):
    class Endless:
        """Brings nothing before it is told to."""

        def key(self, block):
            return str(block)

        def read(self, block):
            raise OSError("gone")

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "multipack-fetch"]

    gc.collect()
    before = set(threads())
    cache = BlockCache(tmp_path, 1 << 20, Endless(), threads=3)
    cache.expect([])
    assert len(set(threads()) - before) == 3
    del cache
    gc.collect()
    deadline = time.monotonic() + 5
    while set(threads()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threads()) - before
