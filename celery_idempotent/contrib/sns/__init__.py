"""Amazon SNS: notifications in a queue of SQS become calls of idempotent tasks; consuming needs the extra ``sns``."""

from celery_idempotent.contrib.sns.consumer import consume
from celery_idempotent.contrib.sns.routing import By, Notification, Route, unwrap

__all__ = ["By", "Notification", "Route", "consume", "unwrap"]
