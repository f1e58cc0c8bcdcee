"""The engine: carries out what the protocol decides, on any store; knows no Celery and no driver."""
