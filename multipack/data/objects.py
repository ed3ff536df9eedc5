"""Objects of a store, over any file system of Arrow or fsspec.

The one rule: what is read is what was opened. An object that changed is an error, a connection that fails is
tried again, and whatever is given up names the URL.
"""

from __future__ import annotations

import fnmatch
import logging
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

_T = TypeVar("_T")

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 8.0
"""Seconds between attempts: doubled each time, with up to half of it again at random."""
_REFUSED = re.compile(
    r"ACCESS_DENIED|AccessDenied|InvalidAccessKeyId|INVALID_ACCESS_KEY|SignatureDoesNotMatch|SIGNATURE_DOES_NOT_MATCH|"
    r"ExpiredToken|NO_SUCH_BUCKET|NoSuchBucket|NO_SUCH_KEY|NoSuchKey|HTTP status 40[134]|Unauthorized|Forbidden",
)
_CORRUPT = re.compile(r"[Cc]orrupt|Truncated compressed")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredObject:
    """An object as it was when it was opened first."""

    url: str
    """As the user knows it, for messages."""
    path: str
    """As the file system knows it."""
    size: int
    """Bytes."""
    version: str
    """Changes with the content: the time of the last change, and the entity tag where the file system tells
    it."""


@dataclass(frozen=True)
class Store:
    """A file system, and how long a connection may fail."""

    filesystem: Any
    """A `pyarrow.fs.FileSystem`."""
    scheme: str
    """Prefix of its URLs in messages, such as "s3://"."""
    patience: float
    """Seconds for which a failing request is tried again."""

    def find(self, paths: Iterable[str], suffixes: tuple[str, ...]) -> list[StoredObject]:
        """The objects with these paths. A path may hold `*` in its last parts, or be a folder: then all
        objects in it with one of the suffixes, in the order of their paths.

        Raises:
            FileNotFoundError: there is none.
            PermissionError: the store refuses.
        """
        found: list[StoredObject] = []
        for path in paths:
            objects = self._under(path, suffixes)
            if not objects:
                raise FileNotFoundError(f"{self.scheme}{path}: there is no such object. Check the URL.")
            found += objects
        return found

    def _under(self, path: str, suffixes: tuple[str, ...]) -> list[StoredObject]:
        url = f"{self.scheme}{path}"
        if "*" in path:
            folder = path[: path.index("*")].rpartition("/")[0]
            infos = self.retry(url, lambda: self._list(folder))
            infos = [info for info in infos if fnmatch.fnmatchcase(info.path, path)]
        else:
            info = self.retry(url, lambda: self.filesystem.get_file_info(path))
            infos = [info]
            if info.type == fs.FileType.Directory:
                infos = [
                    info for info in self.retry(url, lambda: self._list(path)) if info.path.endswith(suffixes)
                ]
        return [
            self._stored(info)
            for info in sorted(infos, key=lambda info: info.path)
            if info.type == fs.FileType.File
        ]

    def _list(self, folder: str) -> list[Any]:
        return list(self.filesystem.get_file_info(fs.FileSelector(folder, recursive=True)))

    def _stored(self, info: Any) -> StoredObject:
        return StoredObject(f"{self.scheme}{info.path}", info.path, int(info.size), self._version(info))

    def _version(self, info: Any) -> str:
        handler = getattr(self.filesystem, "handler", None)  # of an fsspec file system
        told = handler.fs.info(info.path) if handler is not None else {}
        tag = told.get("ETag") or told.get("etag") or told.get("md5Hash") or ""
        return f"{info.mtime_ns}{tag}"

    def read(self, stored: StoredObject, read: Callable[[Any], _T]) -> _T:
        """What `read` makes of the open file; called again from the start when the connection fails.

        Raises:
            FileNotFoundError, PermissionError: the store says so.
            ConnectionError: it failed for longer than `patience`.
            ValueError: the object has changed since it was opened first, or is corrupt.
        """

        def attempt() -> _T:
            info = self.filesystem.get_file_info(stored.path)
            if info.type != fs.FileType.File:
                raise FileNotFoundError(f"{stored.url}: the object is gone since it was opened first.")
            self._check_unchanged(stored, info)
            with self.filesystem.open_input_file(stored.path) as file:
                return read(file)

        return self.retry(stored.url, attempt)

    def _check_unchanged(self, stored: StoredObject, info: Any) -> None:
        if info.size != stored.size or self._version(info) != stored.version:
            raise ValueError(
                f"{stored.url} has changed since it was opened first (then {stored.size} bytes, version "
                f"{stored.version}; now {info.size} bytes, version {self._version(info)}): its rows are no "
                "longer those that the plan was made of. Write changed data under another name, and open "
                "them again."
            )

    def retry(self, url: str, attempt: Callable[[], _T]) -> _T:
        """The result of `attempt`, called again while the store cannot be reached. Errors name the URL."""
        give_up = time.monotonic() + self.patience
        wait = _FIRST_WAIT
        while True:
            try:
                return attempt()
            except (FileNotFoundError, PermissionError) as error:
                raise type(error)(_named(url, error)) from error
            except pa.ArrowInvalid as error:
                raise ValueError(_unreadable(url, error)) from error
            except OSError as error:
                if _CORRUPT.search(str(error)):
                    raise ValueError(_unreadable(url, error)) from error
                if _REFUSED.search(str(error)):
                    raise PermissionError(
                        f"{url}: the store refuses: {error}. Check the credentials, the bucket and the "
                        "region."
                    ) from error
                if time.monotonic() + wait > give_up:
                    raise ConnectionError(
                        f"{url} could not be read for {self.patience:g} s: {error}. Raise `patience` if the "
                        "store may be away for longer."
                    ) from error
                _logger.warning("%s: %s; trying again in %.1f s.", url, error, wait)
            # Ranks that fail together should not come back together. Python's own generator is left alone.
            time.sleep(wait * (1 + _jitter.random() / 2))
            wait = min(2 * wait, _LONGEST_WAIT)


_jitter = random.Random()


def _unreadable(url: str, error: Exception) -> str:
    return f"{url} cannot be read: {error}. It may be truncated; write it again."


def _named(url: str, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(url) else f"{url}: {text}"


def store_of(urls: list[str], filesystem: Any, patience: float) -> tuple[Store, list[str]]:
    """The store that holds these URLs, and their paths in it.

    Args:
        urls: of one file system; with `filesystem`, paths in it.
        filesystem: of pyarrow or fsspec; None to find it by the URL: Arrow's own where it has one, else
            fsspec's.

    Raises:
        ImportError: fsspec has no package for the scheme.
        ValueError: the URLs are of several file systems, or of an unknown scheme.
    """
    scheme = urls[0].partition("://")[0] + "://" if "://" in urls[0] else ""
    other = next((url for url in urls if not url.startswith(scheme) or ("://" in url) != bool(scheme)), None)
    if other is not None:
        raise ValueError(f"{urls[0]} and {other} are of two file systems: open them as two data sets.")
    if filesystem is not None:
        paths = [url.removeprefix(scheme) for url in urls]
        return Store(_as_arrow(filesystem), scheme, patience), paths
    found, _ = _filesystem(urls[0])
    paths = [_filesystem(url, found)[1] for url in urls]
    return Store(found, "" if scheme == "file://" else scheme, patience), paths


def _filesystem(url: str, known: Any = None) -> tuple[Any, str]:
    """File system and path of a URL; `known` stands for its file system where that is Arrow's."""
    try:
        found, path = fs.FileSystem.from_uri(url) if "://" in url else (fs.LocalFileSystem(), url)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        import fsspec  # imported here: Arrow's own file systems do not need it

        handler, path = fsspec.url_to_fs(url)
        found = _as_arrow(handler)
    return (found if known is None else known), path


def _as_arrow(filesystem: Any) -> Any:
    if isinstance(filesystem, fs.FileSystem):
        return filesystem
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem))
