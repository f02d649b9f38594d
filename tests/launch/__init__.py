"""Plans, attempts and their first causes."""
