"""The whole path for real: command line, SSH, agents, torchrun, DeepSpeed."""
