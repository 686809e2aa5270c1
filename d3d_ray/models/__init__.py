"""The models: target, drafter, their KV caches and how they are loaded."""
