"""Megatron's token files, written here byte by byte as its builder lays them out."""

from __future__ import annotations

import logging
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from multipack.data.dataset import TokenDataset
from multipack.data.token_files import megatron

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write(prefix, sequences, documents=None, dtype="uint16", modes=None, code=None, magic=b"MMIDIDX\0\0"):
    """`documents[d]` is the first sequence of document d, and one more; None: each sequence is a document."""
    arrays = [np.asarray(sequence, dtype) for sequence in sequences]
    documents = list(range(len(arrays) + 1)) if documents is None else documents
    index = magic + struct.pack("<QBQQ", 1, code or CODES[dtype], len(arrays), len(documents))
    index += b"".join(struct.pack("<i", len(array)) for array in arrays)
    begin = 0
    for array in arrays:
        index += struct.pack("<q", begin)
        begin += array.nbytes
    index += struct.pack(f"<{len(documents)}q", *documents)
    index += bytes(modes or [])
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    return prefix


def tokens(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


SEQUENCES = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_is_read(tmp_path, dtype):
    dataset = TokenDataset(megatron(write(tmp_path / "a", SEQUENCES, dtype=dtype)))
    assert tokens(dataset) == SEQUENCES
    assert dataset.lengths.tolist() == [3, 1, 2, 4]


def test_the_largest_tokens_keep_their_value(tmp_path):
    assert tokens(TokenDataset(megatron(write(tmp_path / "a", [[65535, 0]])))) == [[65535, 0]]
    assert tokens(TokenDataset(megatron(write(tmp_path / "b", [[2**31 - 1, -1]], dtype="int32")))) == [
        [2**31 - 1, -1]
    ]


def test_a_row_is_a_document_or_one_of_its_sequences(tmp_path):
    prefix = write(tmp_path / "a", SEQUENCES, documents=[0, 2, 2, 4])
    documents = TokenDataset(megatron(prefix))
    # The second document has no sequence, so it is an empty row.
    assert tokens(documents) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert documents.report.empty_sequences == 1
    assert documents.rows.tolist() == [0, 2]
    assert tokens(TokenDataset(megatron(prefix, rows="sequences"))) == SEQUENCES


def test_several_prefixes_are_one_data_set_and_suffixes_are_left_off(tmp_path):
    first = write(tmp_path / "a", SEQUENCES[:2], documents=[0, 2])
    second = write(tmp_path / "b", SEQUENCES[2:])
    paths = [str(first), f"{second}.bin"]
    assert tokens(TokenDataset(megatron(paths))) == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]


def test_it_pickles_as_paths_also_from_another_folder(tmp_path, monkeypatch):
    write(tmp_path / "a", [[1] * 50_000])
    monkeypatch.chdir(tmp_path)
    dataset = TokenDataset(megatron("a"))
    monkeypatch.chdir("/")
    raw = pickle.dumps(dataset)
    assert len(raw) < 3000  # 100 kB of tokens stay in their file
    assert tokens(pickle.loads(raw)) == [[1] * 50_000]


def test_byte_offsets_beyond_2_31_are_right(tmp_path):
    # NVIDIA/Megatron-LM#1672. Three documents in a sparse file: 2^31 - 1 zeros, then one token, then two.
    prefix = tmp_path / "a"
    lengths, begins = [2**31 - 1, 1, 2], [0, 2 * (2**31 - 1), 2 * 2**31]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", *begins) + struct.pack("<4q", 0, 1, 2, 3)
    prefix.with_suffix(".idx").write_bytes(index)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.seek(begins[1])
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    dataset = TokenDataset(megatron(prefix))
    assert dataset.lengths.tolist() == lengths
    assert dataset[1]["input_ids"].tolist() == [7]
    assert dataset[2]["input_ids"].tolist() == [8, 9]


def test_opening_costs_the_lengths_and_no_more(tmp_path):
    # 4 million documents of one token: their lengths take 8 MB, pointers and documents would take 64 MB.
    count = 4_000_000
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        np.ones(count, np.int32).tofile(file)
        (2 * np.arange(count)).tofile(file)
        np.arange(count + 1).tofile(file)
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * count)
    tracemalloc.start()
    dataset = TokenDataset(megatron(tmp_path / "a"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dataset.lengths.nbytes == 2 * count
    assert peak < dataset.lengths.nbytes + 24_000_000  # blocks of a million rows, whatever the number of rows


@pytest.mark.parametrize("rows", ["documents", "sequences"])
def test_no_documents_at_all(tmp_path, rows):
    assert len(TokenDataset(megatron(write(tmp_path / "a", []), rows=rows))) == 0


def test_modes_of_text_are_allowed_and_others_refused(tmp_path):
    assert tokens(TokenDataset(megatron(write(tmp_path / "a", SEQUENCES, modes=[0, 0, 0, 0])))) == SEQUENCES
    prefix = write(tmp_path / "b", SEQUENCES, modes=[0, 0, 1, 0])
    with pytest.raises(ValueError, match=r"b\.idx has sequences of other modes than text, from sequence 2"):
        TokenDataset(megatron(prefix))


def test_bytes_behind_the_last_sequence_are_said(tmp_path, caplog):
    prefix = write(tmp_path / "a", SEQUENCES)
    with prefix.with_suffix(".bin").open("ab") as file:
        file.write(bytes(6))
    with caplog.at_level(logging.WARNING):
        assert tokens(TokenDataset(megatron(prefix))) == SEQUENCES
    assert "a.bin has 6 bytes behind its last sequence" in caplog.text


def broken(tmp_path, file, change):
    prefix = write(tmp_path / "a", SEQUENCES, documents=[0, 2, 4])
    path = prefix.with_suffix(file)
    path.write_bytes(change(path.read_bytes()))
    return prefix


def put(raw: bytes, at: int, value: bytes) -> bytes:
    return raw[:at] + value + raw[at + len(value) :]


# Header of 34 bytes: 9 magic, 8 version, 1 dtype, 8 sequences, 8 documents. Then 4 lengths, 4 pointers, 3
# documents.
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (".idx", lambda raw: b"TNTIDX\0\0" + raw[8:], r"a\.idx begins with b'TNTIDX.*no index"),
        (".idx", lambda raw: raw[:20], r"a\.idx ends inside its header, after 20 bytes"),
        (".idx", lambda raw: put(raw, 9, b"\2"), r"a\.idx has version 2"),
        (".idx", lambda raw: put(raw, 17, b"\11"), r"a\.idx has the dtype code 9"),
        (".idx", lambda raw: raw[:-1], r"a\.idx has 105 bytes, but .* take 106: it is truncated"),
        (".idx", lambda raw: raw + b"\0\0", r"a\.idx has 2 bytes behind its 4 sequences"),
        (".idx", lambda raw: put(raw, 18, b"\377" * 7), r"a\.idx has 106 bytes, but .* it is truncated"),
        (".idx", lambda raw: put(raw, 98, b"\5"), r"a\.idx has documents of the sequences 0\.\.5"),
        (
            ".idx",
            lambda raw: put(raw, 90, b"\11"),
            r"a\.idx: row 0 is made of the sequences 0\.\.9 of 4: the index is corrupt",
        ),
        (".idx", lambda raw: put(raw, 58, b"\3"), r"a\.idx: row 0 .* last sequence at byte 3,"),
        (".idx", lambda raw: put(raw, 66, b"\110"), r"a\.idx: row 1 begins at byte 72 .* corrupt"),
        (
            ".idx",
            lambda raw: put(raw, 38, b"\377\377\377\177"),
            r"a\.idx: row 0 has offsets 0\.\.2147483650 into 10",
        ),
        (".bin", lambda raw: raw[:-2], r"a\.bin has 18 bytes, but its index needs 20 .* truncated"),
    ],
)
def test_broken_files_are_named(tmp_path, file, change, message):
    with pytest.raises(ValueError, match=message):
        TokenDataset(megatron(broken(tmp_path, file, change)))


def test_missing_files_and_unknown_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.idx"):
        megatron(tmp_path / "missing")
    prefix = write(tmp_path / "a", SEQUENCES)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.bin"):
        TokenDataset(megatron(prefix))
    with pytest.raises(ValueError, match="rows"):
        megatron(prefix, rows="sentences")
    with pytest.raises(ValueError, match="no file is named"):
        megatron([])


def test_files_of_two_dtypes_are_refused(tmp_path):
    paths = [write(tmp_path / "a", SEQUENCES), write(tmp_path / "b", SEQUENCES, dtype="int32")]
    with pytest.raises(ValueError, match=r"b\.idx holds int32, but .*a\.idx holds uint16"):
        TokenDataset(megatron(paths))


def test_other_columns_are_refused(tmp_path):
    prefix = write(tmp_path / "a", SEQUENCES)
    with pytest.raises(ValueError, match="has no column"):
        TokenDataset(megatron(prefix), columns=["labels"])
    with pytest.raises(ValueError, match=r"has no column \['text'\]"):
        TokenDataset(megatron(prefix), column="text")


def test_files_of_megatrons_own_builder(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 100_000, rng.integers(1, 50)) for _ in range(200)]
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    dataset = TokenDataset(megatron(tmp_path / "a"))
    assert tokens(dataset) == [document.tolist() for document in documents]
