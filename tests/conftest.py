"""What all tests share: the fixtures of both labs, and no test of how long something takes."""

from hypothesis import settings

settings.register_profile("r4090c", deadline=None)  # tests never assert time: the machine may be busy with others
settings.load_profile("r4090c")

pytest_plugins = ["tests.lab.fixtures", "tests.vmlab.fixtures"]
