"""The Celery app, as in a project of yours: a broker, a store, and two settings that are not optional."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from celery import Celery

# The emulated SQS and DynamoDB that `run.py` starts. The two variables name real or other ones instead.
LOCAL = "test:test@127.0.0.1:4577"
BROKER_URL = os.environ.get("EXAMPLE_BROKER_URL", f"sqs://{LOCAL}//")
STORE_URL = os.environ.get("EXAMPLE_STORE_URL", f"dynamodb://{LOCAL}/celery-idempotent-example?region=us-east-1")

app = Celery("example_project", broker=BROKER_URL, include=["example_project.tasks"])
app.conf.update(
    # Where the records of idempotent tasks are kept. This and `IdempotentTask` is all that the library needs.
    idempotency_store=STORE_URL,
    # Acknowledge a message after the body, not before it: else it is lost with its worker.
    task_acks_late=True,
    # Give the message of a killed process back. Without it Celery acknowledges that one: late, but lost all the same.
    task_reject_on_worker_lost=True,
    # Fetch no more than can be worked on: another worker may be idle.
    worker_prefetch_multiplier=1,
    task_default_queue="celery-idempotent-example",
    # A living worker holds the messages of all tasks that it has, however long their bodies take.
    idempotency_hold_messages="all",
    # SQS carries no remote control.
    worker_enable_remote_control=False,
    # Let everybody see what the tasks print.
    worker_redirect_stdouts=False,
)
if BROKER_URL.startswith("sqs:"):
    app.conf.broker_transport_options = {
        # After that, a message of a dead worker is delivered again; right only where messages of all tasks are held.
        "visibility_timeout": 60,
        # Fetch the next message at once. By default kombu waits a second whenever its hands were full.
        "polling_interval": 0,
        "wait_time_seconds": 1,  # Long polling, short here so that a worker stops quickly; by default 10.
        "is_secure": urlsplit(BROKER_URL).hostname is None,  # HTTPS to AWS, HTTP to an emulator at an address.
    }
