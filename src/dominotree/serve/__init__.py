"""The HTTP server: an engine thread that batches trees, behind routes that speak the OpenAI API."""
