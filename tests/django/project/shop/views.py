"""What the shop's customers ask for."""

from django.db import transaction
from django.http import HttpRequest, HttpResponse

from tests.django.project.shop.tasks import charge


def checkout(request: HttpRequest, order_id: str) -> HttpResponse:
    """Charge within the request; `?on_commit` waits for the end of its transaction."""
    answers: list[str] = []

    def pay() -> None:
        answers.append(charge.apply((order_id,)).get())

    if "on_commit" in request.GET:
        transaction.on_commit(pay)
    else:
        pay()
    return HttpResponse(" ".join(answers))
