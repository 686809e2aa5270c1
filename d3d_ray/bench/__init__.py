"""Measuring: the modes side by side on the same prompts, tables, traces and timelines."""
