"""Our signature against botocore's own."""

import time
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.stores.dynamodb.direct import Signature

_WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
_URLS = st.one_of(
    st.sampled_from(
        [
            "https://dynamodb.eu-west-1.amazonaws.com/",
            "https://123456789012.ddb.us-east-1.amazonaws.com/",
            "https://dynamodb-fips.us-gov-west-1.amazonaws.com:443/",
            "http://localhost:8000/",
            "http://[::1]:8000/",
        ]
    ),
    st.builds(
        "http://10.0.0.1:{}/{}".format,
        st.integers(1, 65535),
        st.from_regex(r"[a-zA-Z0-9 ~%/.+-]{0,12}", fullmatch=True),
    ),
)
_HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "X-Amz-Target", "X-Other"]),
    st.lists(_WORDS, min_size=1, max_size=3).map("  ".join),
)
_TIMES = st.integers(0, 4_102_444_800)


@given(
    url=_URLS,
    headers=_HEADERS,
    key=_WORDS,
    secret=_WORDS,
    token=st.none() | _WORDS,
    region=_WORDS.filter(lambda text: "/" not in text),
    bodies=st.lists(st.tuples(_TIMES, st.binary(max_size=300)), min_size=1, max_size=4),
)
def test_signature_is_botocores(
    url: str,
    headers: dict[str, str],
    key: str,
    secret: str,
    token: str | None,
    region: str,
    bodies: list[tuple[int, bytes]],
) -> None:
    """Whatever is signed, whenever, by whom and how often with one key."""
    credentials = ReadOnlyCredentials(key, secret, token)
    signature = Signature(url, headers, credentials, region, "dynamodb")

    for at, body in bodies:
        with pytest.MonkeyPatch.context() as patched:
            now = time.gmtime(at)
            patched.setattr("celery_idempotent.stores.dynamodb.direct.time.gmtime", lambda now=now: now)
            date, authorization = signature.headers(body).values()

        sent = AWSRequest("POST", url, {**headers, **signature.token, "X-Amz-Date": date}, body)
        assert date == time.strftime("%Y%m%dT%H%M%SZ", now)
        assert authorization == _botocores(sent, date, SigV4Auth(credentials, "dynamodb", region))


def _botocores(request: Any, date: str, auth: Any) -> str:
    request.context["timestamp"] = date
    signature = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    auth._inject_signature_to_request(request, signature)
    return str(request.headers["Authorization"])
