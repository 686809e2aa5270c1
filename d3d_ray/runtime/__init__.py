"""The decode loops on Ray: actors, links, placement and the engine."""
