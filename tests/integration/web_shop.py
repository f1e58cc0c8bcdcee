"""A shop whose page is served by its own command, in a process of its own."""

import os

from tests.support.web import a_shop

app = a_shop(idempotency_store=os.environ.get("SHOP_STORE"))
