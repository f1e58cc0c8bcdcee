"""How templates print what somebody else has chosen."""

from django.template import Library

from celery_idempotent.printable import one_line

register = Library()
register.filter("one_line", one_line)
