"""What the shop keeps."""

from django.db import models


class Charge(models.Model):
    """One effect: an order was charged."""

    id = models.BigAutoField(primary_key=True)
    order_id = models.CharField(max_length=40)
    process = models.IntegerField()

    class Meta:
        """Found by its app."""

        app_label = "shop"
