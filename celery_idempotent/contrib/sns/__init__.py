"""Amazon SNS: notifications in a queue of SQS become calls of idempotent tasks; consuming needs the extra ``sns``."""

from celery_idempotent.contrib.sns.notification import Notification, unwrap
from celery_idempotent.contrib.sns.routing import By, Route
from celery_idempotent.contrib.sns.step import consume

__all__ = ["By", "Notification", "Route", "consume", "unwrap"]
