"""The OpenAI-compatible endpoint: bodies of requests, errors, stop strings."""
