"""Where large results are kept, opened from a URL; and what you need to keep them elsewhere."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Protocol, cast
from urllib.parse import parse_qsl, unquote, urlencode

from celery_idempotent.errors import PolicyError
from celery_idempotent.printable import scheme_of
from celery_idempotent.stores import open_registered, opener_of

__all__ = ["LargeResults", "ObjectMissing", "ObjectStore", "open_large_results"]

_SETTING = "idempotency_large_results"

_BUILT_IN = {
    "s3": ("celery_idempotent.stores.objects.s3:S3Objects.at", "s3", frozenset({"region", "endpoint"})),
    "file": ("celery_idempotent.stores.objects.folder:FolderObjects.at", None, frozenset[str]()),
}
"""By URL scheme: what opens it, the extra that brings its driver, and the options beside ``over``."""

_GROUP = "celery_idempotent.objects"

_OVER = 100 * 1024
"""Bytes, where the URL says nothing: a quarter of what an item of DynamoDB has room for."""

_SIZE = re.compile(r"(\d{1,12}) ?(B|KB|MB|)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "B": 1, "KB": 1024, "MB": 1024 * 1024}

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)


class ObjectMissing(Exception):
    """There is certainly no object of that name."""


class ObjectStore(Protocol):
    """Keeps bytes under names. All of it must be safe to call from several threads and after a fork.

    Any failure of the driver surfaces as :class:`~celery_idempotent.errors.StoreUnavailable`, and as its subclass
    ``StoreMisconfigured`` where it stays so until somebody changes something.
    """

    def put(self, name: str, data: bytes) -> None:
        """Write the object, whole and durable, once this returns; safe to repeat.

        Raises:
            StoreUnavailable: No certain answer; it may have been written.
        """

    def get(self, name: str) -> bytes:
        """The object's bytes, as soon as :meth:`put` has returned, to everybody.

        Raises:
            ObjectMissing: There is certainly none.
            StoreUnavailable: No certain answer.
        """

    def delete(self, name: str) -> None:
        """Delete the object, if it is there.

        Raises:
            StoreUnavailable: No certain answer.
        """


@dataclass(frozen=True, slots=True)
class LargeResults:
    """Where encoded results go that are larger than a record should be."""

    #: Keeps them.
    objects: ObjectStore
    #: Bytes; a result with more of them is kept as an object.
    over: int
    #: How the name of each object begins.
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL of ``idempotency_large_results`` says; a folder has no bucket. The login is not for people."""

    scheme: str
    login: str = field(repr=False)
    bucket: str
    path: str
    over: int
    options: Mapping[str, str] = field(repr=False)

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{login}{self.bucket}/{self.path}{query}"


def address_of(url: str) -> Address:
    """What ``url`` says; nothing is imported or connected for it."""
    before, _, query = url.partition("?")
    scheme, separator, rest = before.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise _unusable(url, "write s3://bucket/prefix?over=100KB")
    # The secrets that AWS makes have slashes in them.
    login, _, place = rest.rpartition("@")
    bucket, _, path = place.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    over = _size_of(url, options.pop("over", str(_OVER)))
    if scheme in _BUILT_IN:
        _check(url, scheme, login, bucket, path, options)
    return Address(scheme, login, bucket, unquote(path), over, options)


def _check(url: str, scheme: str, login: str, bucket: str, path: str, options: Mapping[str, str]) -> None:
    known = _BUILT_IN[scheme][2]
    unknown = sorted(options.keys() - known)
    if unknown:
        raise _unusable(url, f"unknown option {', '.join(unknown)}; there are {', '.join(sorted({*known, 'over'}))}")
    if scheme == "file" and (login or bucket or not path):
        raise _unusable(url, "write file:///absolute/folder?over=100KB")
    if scheme == "s3" and not _BUCKET.fullmatch(bucket):
        raise _unusable(url, "the bucket's name cannot be read; write s3://bucket/prefix?over=100KB")
    if login and not all(login.partition(":")):
        raise _unusable(url, "before the @ stand a key and its secret, key:secret@bucket, or nothing")
    endpoint = options.get("endpoint")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise _unusable(url, "endpoint is a URL, such as endpoint=http://localhost:9000")


def _size_of(url: str, text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise _unusable(url, f"over={text[:40]!r} is not a size; write over=100KB, over=1MB or a number of bytes")
    return int(found[1]) * _UNITS[found[2].upper()]


def check_setting(setting: object) -> None:
    """Refuse what :func:`open_large_results` would refuse, as far as can be told without any driver."""
    if isinstance(setting, str):
        address_of(setting)
    elif not isinstance(setting, LargeResults):
        raise PolicyError(
            _SETTING, repr(setting), "must be a URL such as s3://bucket/prefix?over=100KB, or LargeResults"
        )


def open_large_results(setting: str | LargeResults) -> LargeResults:
    """Where large results go, as ``setting`` names it; one that is opened is returned as it is.

    Args:
        setting: ``s3://bucket/prefix?over=100KB``, ``file:///folder?over=100KB``, or the scheme of an entry point in
            the group ``celery_idempotent.objects``, which must be a callable that takes the URL, without ``over``, and
            returns an :class:`ObjectStore`. The names that this is given begin with the URL's path.

    Raises:
        PolicyError: Unknown scheme, missing driver or unusable URL; the message names the remedy.
    """
    check_setting(setting)
    if not isinstance(setting, str):
        return setting
    address = address_of(setting)
    prefix = address.path.strip("/")
    is_folder = address.scheme == "file"
    return LargeResults(_opened(setting, address), address.over, f"{prefix}/" if prefix and not is_folder else "")


def _opened(url: str, address: Address) -> ObjectStore:
    if address.scheme in _BUILT_IN:
        path, extra, _ = _BUILT_IN[address.scheme]
        return cast(ObjectStore, opener_of(path, extra, partial(_unusable, url))(address))
    registered = {each.name: each for each in entry_points(group=_GROUP)}
    if address.scheme not in registered:
        known = ", ".join(sorted({*_BUILT_IN, *registered}))
        raise _unusable(url, f"nothing has this scheme; known schemes: {known}")
    entry_point = registered[address.scheme]
    return cast(ObjectStore, open_registered(entry_point, address.url, ObjectStore, partial(_unusable, url)))


def _unusable(url: str, remedy: str) -> PolicyError:
    return PolicyError(_SETTING, scheme_of(url), remedy)
