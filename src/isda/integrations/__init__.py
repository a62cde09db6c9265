"""Integrations with training frameworks, which no other part of isda imports."""
