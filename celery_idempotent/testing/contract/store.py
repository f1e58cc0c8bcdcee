"""The contract that every store passes, from its parts."""

from celery_idempotent.testing.contract.clock import ClockContract
from celery_idempotent.testing.contract.contents import ContentsContract
from celery_idempotent.testing.contract.operators import OperatorsContract
from celery_idempotent.testing.contract.races import RacesContract
from celery_idempotent.testing.contract.swap import SwapContract


class StoreContract(SwapContract, ContentsContract, RacesContract, OperatorsContract, ClockContract):
    """Tests that any store must pass; needs a fixture ``store`` that gives a provisioned one."""
