"""The contract of a store, as tests: subclass it, give it one fixture, and every rule of ``swap`` is checked.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            store.provision()
            yield store
            store.close()

        def reopen(self, store):            # another instance over the same records
            return MyStore(...)


    class TestMyStoreInAnOutage(OutageContract):
        @pytest.fixture
        def unreachable_store(self):
            return MyStore(...)             # of a server that is gone

The store may hold records of others: every test uses keys of its own. All tests are plain methods that take
a store and assert, so they can be called without pytest, too.
"""

from celery_idempotent.testing.contract.records import a_claim, a_completion, a_record, a_rival

__all__ = ["a_claim", "a_completion", "a_record", "a_rival"]
