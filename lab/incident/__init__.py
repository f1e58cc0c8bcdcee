"""An incident from its first second to the last verdict, on a real worker, store and provider: `how-to/incident.md`."""
