"""Amazon SNS: what its topics put into queues."""

from celery_idempotent.contrib.sns.notification import Notification, unwrap

__all__ = ["Notification", "unwrap"]
