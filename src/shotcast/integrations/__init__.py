"""Modules that other frameworks load to communicate by shotcast. Each imports its host program late."""
