"""Descriptions of model families, which :mod:`shotcast.models.registry` lists."""
