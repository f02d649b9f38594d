"""Tests: golden cases, properties, and real parts in a lab of network namespaces."""
