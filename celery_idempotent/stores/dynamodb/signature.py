"""Signature Version 4 of requests to one operation, which differ in their date and their body alone.

What is signed, and in which form, botocore decides once. What is left for each request is hashing.
"""

import hmac
import time
from collections.abc import Mapping
from hashlib import sha256

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

_DATE = "the-date-of-the-request"
_DIGEST = 64
"""Characters of a SHA-256 in hexadecimal, with which a canonical request ends."""


class Signature:
    """Signs requests to ``url`` by POST.

    Args:
        url: Where they go.
        headers: Those of their headers that are signed, without date and token.
        credentials: By whom.
        region: Of the signature.
        service: Of the signature.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], credentials: ReadOnlyCredentials, region: str, service: str
    ) -> None:
        #: The header with the token of temporary credentials, if they are.
        self.token = {"X-Amz-Security-Token": credentials.token} if credentials.token else {}
        botocores = SigV4Auth(credentials, service, region)
        request = AWSRequest("POST", url, {**headers, **self.token, "X-Amz-Date": _DATE})
        canonical = botocores.canonical_request(request)
        self._before, self._between = canonical[:-_DIGEST].split(_DATE)
        #: The ``Host`` header that is signed.
        self.host = next(line for line in canonical.splitlines() if line.startswith("host:")).removeprefix("host:")
        self._scope = f"{region}/{service}/aws4_request"
        self._credential = f"AWS4-HMAC-SHA256 Credential={credentials.access_key}"
        self._headers = botocores.signed_headers(botocores.headers_to_sign(request))
        self._secret = f"AWS4{credentials.secret_key}"
        self._key_of_a_day = "", b""

    def headers(self, body: bytes) -> tuple[str, str]:
        """``X-Amz-Date`` and ``Authorization`` of a request that leaves now."""
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        day = date[:8]
        canonical = f"{self._before}{date}{self._between}{sha256(body).hexdigest()}"
        text = f"AWS4-HMAC-SHA256\n{date}\n{day}/{self._scope}\n{sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._key(day), text.encode(), "sha256").hex()
        return (
            date,
            f"{self._credential}/{day}/{self._scope}, SignedHeaders={self._headers}, Signature={signature}",
        )

    def _key(self, day: str) -> bytes:
        known, key = self._key_of_a_day
        if known != day:
            key = self._secret.encode()
            for each in (day, *self._scope.split("/")):
                key = hmac.digest(key, each.encode(), "sha256")
            self._key_of_a_day = day, key
        return key
