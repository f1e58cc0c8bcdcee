"""The shop's settings; what differs from test to test comes from the environment."""

import json
import os

SECRET_KEY = "of a shop that sells nothing"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
ROOT_URLCONF = "tests.django.project.urls"
USE_TZ = True
LOGGING_CONFIG = None
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "celery_idempotent.contrib.django",
    "tests.django.project.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {"default": json.loads(os.environ.get("SHOP_DATABASE", '{"ENGINE": "django.db.backends.sqlite3"}'))}

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER", "memory://")
CELERY_RESULT_BACKEND = os.environ.get("SHOP_BROKER", "cache+memory://")
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("SHOP_QUEUE", "shop")
CELERY_IMPORTS = ["tests.django.project.reports"]
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_IDEMPOTENCY_GRACE = 0.2 if "SHOP_BROKER" in os.environ else 5  # workers recover soon; pages take their time
CELERY_IDEMPOTENCY_STORE = os.environ.get("SHOP_STORE", "django://default")
