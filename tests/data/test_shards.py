"""MDS shards and WebDataset tars, written by their own libraries."""

from __future__ import annotations

import gc
import io
import sys
import tarfile
import warnings

import numpy as np
import pytest

from multipack.data.dataset import TokenDataset
from multipack.data.shards import mds_rows, webdataset_rows

ROWS = [[1, 2, 3], [4], [65535, 6]]


def tokens(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def npy(row):
    file = io.BytesIO()
    np.save(file, np.array(row, np.uint16))
    return file.getvalue()


def write_tar(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


@pytest.fixture
def _webdataset():
    pytest.importorskip("webdataset")
    yield
    gc.collect()  # while `leaves_files_open` holds


leaves_files_open = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # both libraries do


@leaves_files_open
@pytest.mark.usefixtures("_webdataset")
def test_files_of_a_tar_are_columns(tmp_path):
    urls = [
        write_tar(
            tmp_path / "a.tar",
            [("x.npy", npy(ROWS[0])), ("x.cls", b"7"), ("y.npy", npy(ROWS[1])), ("y.cls", b"8")],
        ),
        write_tar(tmp_path / "b.tar", [("z.npy", npy(ROWS[2])), ("z.cls", b"9")]),
    ]
    rows = webdataset_rows(urls, {"input_ids": "npy", "kind": "cls"})
    dataset = TokenDataset.from_iterable(rows)
    assert tokens(dataset) == ROWS
    assert [dataset[i]["kind"].item() for i in range(3)] == [7, 8, 9]
    assert len(list(rows)) == 3  # can be read again


@leaves_files_open
@pytest.mark.usefixtures("_webdataset")
def test_raw_numbers_in_a_tar(tmp_path):
    samples = [(f"{i}.tok", np.array(row, np.uint16).tobytes()) for i, row in enumerate(ROWS)]
    rows = webdataset_rows(
        write_tar(tmp_path / "a.tar", samples), {"input_ids": "tok"}, {"input_ids": np.uint16}
    )
    assert tokens(TokenDataset.from_iterable(rows)) == ROWS


@leaves_files_open
@pytest.mark.usefixtures("_webdataset")
def test_what_a_tar_lacks_is_named(tmp_path):
    url = write_tar(tmp_path / "a.tar", [("x.npy", npy(ROWS[0])), ("y.json", b"{}")])
    with pytest.raises(ValueError, match=r"sample 'y' of .*a\.tar has no file \.npy; it has \['\.json'\]"):
        list(webdataset_rows(url, {"input_ids": "npy"}))
    url = write_tar(tmp_path / "b.tar", [("x.tok", b"123")])
    with pytest.raises(
        ValueError, match=r"'input_ids' of sample 'x' .* has 3 bytes, which is no multiple of the 2"
    ):
        list(webdataset_rows(url, {"input_ids": "tok"}, {"input_ids": np.uint16}))
    with pytest.raises(ValueError, match="dtypes names"):
        webdataset_rows(url, {"input_ids": "tok"}, {"labels": np.uint16})


@leaves_files_open
@pytest.mark.usefixtures("_webdataset")
def test_a_truncated_tar_is_an_error(tmp_path):
    url = write_tar(tmp_path / "a.tar", [("x.npy", npy(list(range(5000))))])
    raw = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(raw[:2000])
    with pytest.raises(tarfile.ReadError):
        list(webdataset_rows(url, {"input_ids": "npy"}))


@pytest.fixture
def mds_writer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        streaming = pytest.importorskip("streaming")
    yield streaming.MDSWriter
    gc.collect()


@leaves_files_open
def test_rows_of_mds(tmp_path, mds_writer):
    with mds_writer(
        out=str(tmp_path), columns={"tokens": "ndarray:uint16", "kind": "int"}, size_limit=100
    ) as out:
        for i, row in enumerate(ROWS):
            out.write({"tokens": np.array(row, np.uint16), "kind": i})
    rows = mds_rows(tmp_path)
    assert len(rows) == 3
    dataset = TokenDataset.from_iterable(rows, column="tokens")
    assert tokens(dataset) == ROWS
    assert [dataset[i]["kind"].item() for i in range(3)] == [0, 1, 2]


@leaves_files_open
def test_rows_of_mds_written_as_bytes(tmp_path, mds_writer):
    with mds_writer(out=str(tmp_path), columns={"tokens": "bytes"}) as out:
        for row in ROWS:
            out.write({"tokens": np.array(row, np.int64).tobytes()})
    rows = mds_rows(tmp_path, {"tokens": np.int64})
    assert tokens(TokenDataset.from_iterable(rows, column="tokens")) == ROWS
    with pytest.raises(TypeError, match="column 'labels' of row 0 is a NoneType, not bytes"):
        list(mds_rows(tmp_path, {"labels": np.int64}))


@pytest.mark.parametrize(
    ("read", "module", "package"),
    [
        (lambda: mds_rows("x"), "streaming", "mosaicml-streaming"),
        (lambda: webdataset_rows("x.tar", {"input_ids": "npy"}), "webdataset", "webdataset"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, read, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs the package {package}"):
        read()
