"""The Django app: in this process on a project that is configured here, and in processes of its own under `live`."""
