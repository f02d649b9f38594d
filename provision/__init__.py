"""Make the nodes fit: facts and wish become Steps (pure), Steps are carried out (idempotent, dry-run first), then verified.

steps.py       what a Step is, how a managed block in a file is edited, and the list of procedures
ssh_trust.py   the first procedure: pure planners
on_node.py     what runs on a node: look, carry out, log in to the peers (standard library only)
apply.py       the I/O: connects, looks, plans, carries out, verifies
"""
