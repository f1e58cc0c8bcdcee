"""The shop's pages: its admin, one for its staff, and a checkout that charges within its own request."""

from django.contrib import admin
from django.urls import path

from celery_idempotent.contrib.django.admin import IdempotencyRecordAdmin
from celery_idempotent.contrib.django.models import IdempotencyRecord
from tests.django.project.shop.views import checkout

staff = admin.AdminSite(name="staff")
staff.register(IdempotencyRecord, IdempotencyRecordAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("staff/", staff.urls), path("checkout/<str:order_id>/", checkout)]
