"""Records in a DynamoDB table."""

from celery_idempotent.stores.dynamodb.store import DynamoDBStore

__all__ = ["DynamoDBStore"]
