import pytest
from celery_idempotent.stores import open_store
from celery_idempotent.testing import StoreContract


class TestOne(StoreContract):
    @pytest.fixture
    def store(self, redis_server):
        s = open_store(redis_server.url)
        s.verify()
        yield s
        s.close()

    def reopen(self, store):
        return type(store)(store._given)


class TestCluster(StoreContract):
    @pytest.fixture
    def store(self, redis_cluster):
        s = open_store(f"redis+cluster://{redis_cluster.address}")
        s.verify()
        yield s
        s.close()

    def reopen(self, store):
        return type(store)(store._given)
