"""What runs on the GPUs: imports nothing of the other packages; they meet in files."""
