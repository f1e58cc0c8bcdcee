"""The shop's own tests, as its authors write them; run by `manage.py test`."""

from django.test import TestCase

from tests.django.project.shop.models import Charge
from tests.django.project.shop.tasks import charge


class ChargeTest(TestCase):
    """Eager tasks in Django's own test case."""

    def test_duplicate_is_charged_once(self) -> None:
        """The claim stands in the test's transaction, and goes with it."""
        for _ in range(2):
            assert charge.apply(("o-1",)).get() == "charged o-1"

        assert Charge.objects.count() == 1

    def test_same_order_in_another_test(self) -> None:
        """Nothing is remembered from test to test."""
        self.test_duplicate_is_charged_once()
