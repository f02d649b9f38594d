"""Measurements: what needs two ends. Each has a pure schedule and a program for the nodes; a check judges what came back."""
