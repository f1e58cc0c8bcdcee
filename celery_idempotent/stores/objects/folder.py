"""Objects as files of a folder that all workers share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.stores.objects import Address, ObjectMissing

_FOR_GOOD = (PermissionError, NotADirectoryError, IsADirectoryError)


class FolderObjects:
    """Keeps each object in a file of its own.

    Args:
        folder: Must be there: where a disk is not mounted, nothing may be written to what is under it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    @classmethod
    def at(cls, address: Address) -> Self:
        """The folder that ``file:///folder`` names."""
        return cls(f"/{address.path}")

    def __repr__(self) -> str:
        return f"file://{self._folder}"

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`celery_idempotent.stores.objects.ObjectStore.put`; the file appears whole or not at all."""
        with self._telling("put"):
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{uuid4().hex}")
            try:
                with unfinished.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
            finally:
                with suppress(FileNotFoundError):
                    unfinished.unlink()
            _sync(path.parent)
            _sync(path.parent.parent)

    def get(self, name: str) -> bytes:
        with self._telling("get"):
            path = self._path(name)
            try:
                return path.read_bytes()
            except FileNotFoundError as error:
                raise ObjectMissing(f"{self!r} has no file {name!r}") from error

    def delete(self, name: str) -> None:
        with self._telling("delete"):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        """The file; whoever can write the store chooses what a pointer says, so it must not lead out of the folder."""
        if not self._folder.is_dir():
            raise StoreMisconfigured(repr(self), "look", "the folder is not there; make it, or mount its disk")
        path = Path(os.path.normpath(self._folder / name))
        if not path.is_relative_to(self._folder) or path == self._folder or "\0" in name:
            raise ObjectMissing(f"{self!r} has no file {name!r}")
        return path

    @contextmanager
    def _telling(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, _FOR_GOOD):
                raise StoreMisconfigured(repr(self), operation, str(error)) from error
            raise StoreUnavailable(repr(self), operation, str(error)) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
