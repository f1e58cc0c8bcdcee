"""The shop in processes of its own: a worker, a web server, and a browser that looks at it."""
