"""Model families: one file each, whose description is listed in :mod:`shotcast.models.registry`."""
