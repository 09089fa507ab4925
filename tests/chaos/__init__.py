"""Seeded faults against real servers, and the account of what arrived: ``make chaos``."""
