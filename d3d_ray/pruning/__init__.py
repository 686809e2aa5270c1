"""Progressive pruning: rank the layers, remove the least harmful, heal, and again."""
