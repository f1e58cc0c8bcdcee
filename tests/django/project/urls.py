"""The shop's pages: its admin, and a checkout that charges within its own request."""

from django.contrib import admin
from django.urls import path

from tests.django.project.shop.views import checkout

urlpatterns = [path("admin/", admin.site.urls), path("checkout/<str:order_id>/", checkout)]
