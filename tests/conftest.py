"""What all tests share: the fixtures of both labs."""

pytest_plugins = ["tests.lab.fixtures", "tests.vmlab.fixtures"]
