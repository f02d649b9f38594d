"""What is true on the nodes, and is it good enough? Facts, checks over them, and measurements between nodes."""
