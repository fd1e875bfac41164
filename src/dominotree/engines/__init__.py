"""Thin adapters that run the same trees inside other programs."""
