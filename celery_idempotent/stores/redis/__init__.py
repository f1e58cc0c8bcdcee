"""Records in Redis, Valkey or a cluster of them."""

from celery_idempotent.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
