"""Modules that other frameworks load to communicate through shotcast. Each imports its host program lazily."""
