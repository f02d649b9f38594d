"""Launch: plan what runs where, bring the code, start it on every node, keep the gang, name what went wrong."""
