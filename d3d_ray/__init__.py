"""Lossless asynchronous speculative decoding: the drafter works while the target verifies."""
