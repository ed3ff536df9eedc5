"""Files of nothing but tokens: documents by end token, by metadata, or none; headers that are recognised;
broken files."""

from __future__ import annotations

import gzip
import logging
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack.data import token_files
from multipack.data.dataset import TokenDataset
from multipack.data.token_files import olmo, token_file


def write(path, tokens, dtype=np.uint16, header=b""):
    path.write_bytes(header + np.asarray(tokens, dtype).tobytes())
    return path


def metadata(path, *lines):
    """Dolma's: first token, one behind the last, id, source, line."""
    text = "".join(f'{start},{end},doc-{start},"a,b.jsonl",{i}\n' for i, (start, end) in enumerate(lines))
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(text.encode()))


def tokens(source, **arguments):
    dataset = TokenDataset(source, **arguments)
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


# Documents by end token.


def test_the_end_token_belongs_to_its_document_and_the_rest_is_one_too(tmp_path):
    path = write(tmp_path / "a.bin", [5, 6, 9, 7, 9, 8])
    assert tokens(token_file(path, np.uint16, end=9)) == [[5, 6, 9], [7, 9], [8]]


def test_end_tokens_side_by_side_are_documents_of_their_own(tmp_path):
    path = write(tmp_path / "a.bin", [9, 9, 1, 9])
    assert tokens(token_file(path, np.uint16, end=9)) == [[9], [9], [1, 9]]


@given(
    values=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    block=st.integers(1, 9),
    threads=st.integers(1, 4),
)
def test_a_parallel_search_finds_what_a_plain_one_finds(tmp_path_factory, values, block, threads):
    path = write(tmp_path_factory.mktemp("tokens") / "a.bin", values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_BLOCK", block)
        found = tokens(token_file(path, np.uint16, end=3, threads=threads))
    expected: list[list[int]] = [[]]
    for value in values:
        expected[-1].append(value)
        if value == 3:
            expected.append([])
    assert found == [document for document in expected if document]


def test_tokens_keep_their_value_up_to_the_end_of_the_dtype(tmp_path):
    path = write(tmp_path / "a.bin", [65535, 1, 65535])
    assert tokens(token_file(path, np.uint16, end=65535)) == [[65535], [1, 65535]]
    path = write(tmp_path / "b.bin", [2**32 - 1, 7], np.uint32)
    assert tokens(token_file(path, np.uint32)) == [[2**32 - 1, 7]]


def test_without_an_end_token_a_file_is_one_document(tmp_path):
    paths = [write(tmp_path / "a.bin", [1, 2, 3, 4, 5]), write(tmp_path / "b.bin", [6])]
    assert tokens(token_file(paths, np.uint16), max_length=2, overlong="split") == [[1, 2], [3, 4], [5], [6]]


def test_a_document_does_not_go_on_in_the_next_file(tmp_path):
    paths = [write(tmp_path / "a.bin", [1, 9, 2]), write(tmp_path / "b.bin", [3, 9])]
    assert tokens(token_file(paths, np.uint16, end=9)) == [[1, 9], [2], [3, 9]]


def test_an_empty_file_has_no_documents(tmp_path):
    paths = [write(tmp_path / "a.bin", []), write(tmp_path / "b.bin", [3, 9])]
    assert tokens(token_file(paths, np.uint16, end=9)) == [[3, 9]]
    assert tokens(token_file(paths[0], np.uint16)) == []


def test_an_end_token_that_never_comes_is_said(tmp_path, caplog):
    path = write(tmp_path / "a.bin", [1, 2])
    with caplog.at_level(logging.WARNING):
        assert tokens(token_file(path, np.uint16, end=50256)) == [[1, 2]]
    assert "a.bin has no token 50256 among 2" in caplog.text


def test_it_pickles_without_tokens_and_without_another_search(tmp_path, monkeypatch):
    path = write(tmp_path / "a.bin", [1] * 100_000 + [9] + [2] * 100_000)
    monkeypatch.chdir(tmp_path)
    dataset = TokenDataset(token_file("a.bin", np.uint16, end=9))
    raw = pickle.dumps(dataset)
    assert len(raw) < 3000
    monkeypatch.chdir("/")
    monkeypatch.setattr(token_files, "_end_by_token", None)
    copy = pickle.loads(raw)
    assert copy.lengths.tolist() == [100_001, 100_000]
    assert copy[1]["input_ids"].tolist() == [2] * 100_000
    assert path.stat().st_size == 400_002


def test_a_file_that_changed_is_refused_by_the_process_that_opens_it_later(tmp_path):
    path = write(tmp_path / "a.bin", [1, 9, 2])
    raw = pickle.dumps(TokenDataset(token_file(path, np.uint16, end=9)))
    write(path, [1, 9, 2, 3])
    with pytest.raises(ValueError, match=r"a\.bin has 8 bytes, but had 6 when it was opened first"):
        pickle.loads(raw)


# Headers.


def test_a_real_npy_is_read_behind_its_header(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 9, 8], np.uint16))
    assert tokens(token_file(tmp_path / "a.npy", np.uint16, end=9)) == [[5, 6, 9], [8]]


def test_a_file_of_llmc_is_read_behind_its_header(tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 4
    path = write(tmp_path / "a.bin", [5, 6, 9, 8], header=header.tobytes())
    assert tokens(token_file(path, np.uint16, end=9)) == [[5, 6, 9], [8]]


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.zeros((2, 2), np.uint16), np.uint16, r"holds uint16 of shape \(2, 2\)"),
        (np.zeros(2, np.int32), np.uint16, r"holds int32 of shape \(2,\).*not a flat array of uint16"),
        (np.zeros(2, ">u2"), np.uint16, r"holds >u2"),
    ],
)
def test_a_real_npy_of_another_kind_is_refused(tmp_path, array, dtype, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=message):
        token_file(tmp_path / "a.npy", dtype)


def test_truncated_files_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-2])
    with pytest.raises(
        ValueError, match=r"a\.npy has 134 bytes, but 136 by its \.npy header: it is truncated"
    ):
        token_file(tmp_path / "a.npy", np.uint16)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00\xff")
    with pytest.raises(ValueError, match=r"b\.npy has a corrupt header"):
        token_file(tmp_path / "b.npy", np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 4
    path = write(tmp_path / "c.bin", [5, 6], header=header.tobytes())
    with pytest.raises(ValueError, match=r"c\.bin has 1028 bytes, but 1032 by its llm\.c header"):
        token_file(path, np.uint16)
    (tmp_path / "d.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"d\.bin has 3 bytes of tokens, which is no multiple of the 2"):
        token_file(tmp_path / "d.bin", np.uint16)


def test_arguments_out_of_range(tmp_path):
    path = write(tmp_path / "a.bin", [1])
    with pytest.raises(ValueError, match=r"end=70000 is outside 0\.\.65535, the range of uint16"):
        token_file(path, np.uint16, end=70000)
    with pytest.raises(ValueError, match="end=-1 is outside"):
        token_file(path, np.uint16, end=-1)
    with pytest.raises(ValueError, match="float32 have no end token"):
        token_file(path, np.float32, end=1)
    with pytest.raises(TypeError, match="complex64"):
        token_file(path, np.complex64)
    with pytest.raises(TypeError, match="byte order"):
        token_file(path, ">u2")
    with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
        token_file(tmp_path / "missing.bin", np.uint16)


# Documents by metadata.


def test_metadata_say_where_documents_end(tmp_path):
    path = write(tmp_path / "part-0.npy", [5, 6, 9, 7, 9, 8], np.uint32)
    metadata(path, (0, 3), (3, 5), (5, 6))
    assert tokens(olmo(path, np.uint32)) == [[5, 6, 9], [7, 9], [8]]


def test_tokens_in_no_document_are_left_out_and_said(tmp_path, caplog):
    # Tokens 0, 3 and 6, 7 are in no document; the file behind has no gaps, so rows of both kinds are joined.
    path = write(tmp_path / "part-0.npy", [0, 1, 2, 3, 4, 5, 6, 7])
    metadata(path, (1, 3), (4, 6))
    other = write(tmp_path / "part-1.npy", [8, 9])
    metadata(other, (0, 2))
    with caplog.at_level(logging.WARNING):
        dataset = TokenDataset(olmo([path, other], np.uint16))
    assert [dataset[i]["input_ids"].tolist() for i in range(3)] == [[1, 2], [4, 5], [8, 9]]
    assert dataset.rows.tolist() == [0, 1, 2]
    assert "4 tokens of" in caplog.text
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1]["input_ids"].tolist() == [4, 5]


def test_metadata_without_a_line(tmp_path, caplog):
    path = write(tmp_path / "part-0.npy", [1, 2])
    metadata(path)
    with caplog.at_level(logging.WARNING):
        assert tokens(olmo(path, np.uint16)) == []
    assert "2 tokens of" in caplog.text


def test_missing_metadata_name_the_remedy(tmp_path):
    path = write(tmp_path / "part-0.npy", [1, 2])
    with pytest.raises(FileNotFoundError, match=r"part-0\.csv\.gz is missing.*token_file\(path, dtype, end="):
        olmo(path, np.uint16)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([(0, 2), (1, 3)], "line 2: a document of the tokens 1..3 overlaps"),
        ([(0, 2), (2, 5)], "line 2: a document of the tokens 2..5 overlaps the one before or leaves the 4"),
        ([(2, 1)], "line 1: a document of the tokens 2..1"),
        ([(-1, 1)], "line 1: a document of the tokens -1..1"),
    ],
)
def test_metadata_of_another_file_are_refused(tmp_path, lines, message):
    path = write(tmp_path / "part-0.npy", [1, 2, 3, 4])
    metadata(path, *lines)
    with pytest.raises(ValueError, match=re.escape(message)):
        olmo(path, np.uint16)


def test_broken_metadata_are_named(tmp_path):
    path = write(tmp_path / "part-0.npy", [1, 2])
    for broken in (
        gzip.compress(b"0,2,a\n" * 1000)[:-20],
        b"0,2\n",
        gzip.compress(b"a,b\n"),
        gzip.compress(b"1\n"),
    ):
        path.with_suffix(".csv.gz").write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"part-0\.csv\.gz cannot be read as lines of first and last token"
        ):
            olmo(path, np.uint16)
