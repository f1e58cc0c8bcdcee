"""Claims that not every supported Celery can keep."""

import celery
import pytest


def since_celery(version: str, what: str) -> pytest.MarkDecorator:
    """Skip a test on a Celery before ``version``, such as ``"5.7"``, which brought ``what`` the test needs."""
    wanted = tuple(map(int, version.split(".")))
    return pytest.mark.skipif(celery.VERSION[: len(wanted)] < wanted, reason=f"Celery {version} brought {what}")
