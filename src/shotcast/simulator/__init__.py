"""Schedules in simulated time: collectives as recurrences, requests and stages as events."""
