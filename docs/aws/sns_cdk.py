"""One topic and a queue for each service, for celery_idempotent.contrib.sns: `cdk synth --app "python sns_cdk.py"`."""

from aws_cdk import App, Duration, RemovalPolicy, Stack
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct


class Service(Construct):
    """A queue of the topic, with a queue for its dead letters. What it adds to the policies names the topic."""

    def __init__(self, scope: Construct, name: str, topic: sns.Topic, *, events: list[str], fifo: bool) -> None:
        super().__init__(scope, name)
        common = {
            "encryption": sqs.QueueEncryption.SQS_MANAGED,
            "enforce_ssl": True,
            "retention_period": Duration.days(14),
            "removal_policy": RemovalPolicy.RETAIN,
            "fifo": True if fifo else None,
        }
        ending = ".fifo" if fifo else ""
        dead_letters = sqs.Queue(self, "DeadLetters", queue_name=f"{name}-dead{ending}", **common)
        queue = sqs.Queue(
            self,
            "Queue",
            queue_name=f"{name}{ending}",
            visibility_timeout=Duration.seconds(60),
            dead_letter_queue=sqs.DeadLetterQueue(queue=dead_letters, max_receive_count=5),
            deduplication_scope=sqs.DeduplicationScope.MESSAGE_GROUP if fifo else None,
            fifo_throughput_limit=sqs.FifoThroughputLimit.PER_MESSAGE_GROUP_ID if fifo else None,
            **common,
        )
        wanted = {"event": sns.SubscriptionFilter.string_filter(allowlist=events)}
        topic.add_subscription(
            subscriptions.SqsSubscription(queue, filter_policy=wanted, dead_letter_queue=dead_letters)
        )


class Orders(Stack):
    """The topic and three services that hear of every order."""

    def __init__(self, scope: Construct, name: str, *, fifo: bool = False) -> None:
        super().__init__(scope, name)
        topic = sns.Topic(
            self,
            "Topic",
            topic_name="orders.fifo" if fifo else "orders",
            master_key=kms.Alias.from_alias_name(self, "TopicKey", "alias/aws/sns"),
            fifo=True if fifo else None,
            content_based_deduplication=False if fifo else None,
        )
        for service in ("billing", "stock", "mail"):
            Service(self, f"{service}-orders", topic, events=["placed"], fifo=fifo)


if __name__ == "__main__":
    app = App()
    Orders(app, "orders", fifo=app.node.try_get_context("fifo") == "true")
    app.synth()
