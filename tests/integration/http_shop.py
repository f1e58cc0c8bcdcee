"""One shop behind each framework, as its server loads it. It says by files what it does, and waits where it is told.

``SHOP_STORE`` is the URL of the store, empty for an application without the library; ``SHOP_FOLDER`` holds the ledger.
"""

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path
from flask import Flask
from flask import request as flask_request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from celery_idempotent import Policy, current_attempt
from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware
from celery_idempotent.contrib.http.django import idempotent_view as django_view
from celery_idempotent.contrib.http.flask import idempotent_view as flask_view

FOLDER = Path(os.environ.get("SHOP_FOLDER", "."))
STORE = os.environ.get("SHOP_STORE", "")
OPTIONS: Any = {"store": STORE, "caller": "authorization", "policy": Policy(lease=2)}


def charge(order: dict[str, Any]) -> dict[str, str]:
    """Charge a card at a bank that honours keys; the bank's own answer is what the client gets."""
    key = current_attempt().effect_key("charge") if STORE else str(uuid4())
    with sqlite3.connect(FOLDER / "ledger.sqlite", timeout=30) as bank:
        bank.execute("INSERT INTO charges VALUES (?, ?) ON CONFLICT DO NOTHING", (key, str(uuid4())))
        (receipt,) = bank.execute("SELECT receipt FROM charges WHERE key = ?", (key,)).fetchone()
    if order.get("stall") and not (FOLDER / "killed").exists():
        (FOLDER / "stalled.new").write_text(str(os.getpid()))
        (FOLDER / "stalled.new").rename(FOLDER / "stalled")
        time.sleep(600)  # until it is killed
    return {"receipt": receipt}


def starlette() -> Starlette:
    """Starlette, for uvicorn."""

    async def view(request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(charge, await request.json()), 201)

    middleware = [Middleware(IdempotencyMiddleware, **OPTIONS)] if STORE else []
    return Starlette(routes=[Route("/charges", view, methods=["POST"])], middleware=middleware)


def flask() -> Flask:
    """Flask, for gunicorn."""

    def view() -> tuple[dict[str, str], int]:
        return charge(flask_request.get_json()), 201

    app = Flask("shop")
    app.post("/charges")(flask_view(**OPTIONS)(view) if STORE else view)
    return app


urlpatterns: list[Any] = []


def django_wsgi() -> Any:
    """Django with the decorator, for gunicorn."""
    settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, SECRET_KEY="shop", MIDDLEWARE=[])
    django.setup()

    def view(request: HttpRequest) -> JsonResponse:
        return JsonResponse(charge(json.loads(request.body)), status=201)

    urlpatterns.append(path("charges", django_view(**OPTIONS)(view) if STORE else view))
    return get_wsgi_application()
