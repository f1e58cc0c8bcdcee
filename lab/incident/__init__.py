"""An incident from its first second to the last verdict, on a real worker, store and provider: `docs/incident.md`."""
