"""A Redis Cluster one of whose nodes does not answer: only its own keys lose their leases."""

import time
from contextlib import ExitStack
from uuid import uuid4

import pytest
from redis.cluster import RedisCluster

from celery_idempotent.engine.claim import Claim, claim
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.protocol.operation import Run
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from lab.embedded import EmbeddedRedisCluster
from tests.support.redis_servers import paused, settings
from tests.support.scene import an_operation
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nightly

LEASE = 4_000


def _begun(store: RedisStore, beats: Heartbeat) -> Claim:
    claimed_at = time.monotonic()
    decision = claim(store, an_operation(uuid4().hex, lease=LEASE / 1000))
    assert isinstance(decision, Run)
    attempt = Claim(store, decision.record, lease=LEASE, retain=60_000, claimed_at=claimed_at)
    beats.start(attempt)
    return attempt


def _port_of(store: RedisStore, key: str) -> int:
    cluster = store._connected()
    assert isinstance(cluster, RedisCluster)
    return int(cluster.get_node_from_key(f"celery-idempotent:{key}").port)


def test_a_frozen_node_costs_no_other_nodes_keys_their_leases(redis_cluster: EmbeddedRedisCluster) -> None:
    """24 bodies on three nodes, one of which is frozen for a lease."""
    store, beats = open_store(f"redis+cluster://{redis_cluster.address}"), Heartbeat()
    assert isinstance(store, RedisStore)
    lapsed: set[str] = set()
    with ExitStack() as stack:
        for node in redis_cluster.nodes:
            # The other nodes go on serving their own slots.
            stack.enter_context(settings(node, cluster_node_timeout=600_000, cluster_require_full_coverage="no"))
        attempts = [_begun(store, beats) for _ in range(24)]
        frozen_port = redis_cluster.nodes[0].port
        healthy = [each.key for each in attempts if _port_of(store, each.key) != frozen_port]
        assert 0 < len(healthy) < len(attempts)
        since = store.now()

        def are_held_for_another_lease() -> bool:
            records = [record for key in healthy if (record := store.get(key))]
            lapsed.update(record.key for record in records if record.lease_until < store.now())
            return min(record.lease_until for record in records) > since + 2 * LEASE

        with paused(redis_cluster.nodes[0]):
            wait_until(are_held_for_another_lease, "the keys of the other nodes are renewed")
    for attempt in attempts:
        beats.stop(attempt)
        attempt.release()  # waits for a renewal that is under way

    assert not lapsed
    store.close()
