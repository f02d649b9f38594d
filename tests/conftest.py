"""What all tests share: the fixtures of both labs, no test of how long something takes, and signals as in a terminal."""

import signal

from hypothesis import settings

settings.register_profile("r4090c", deadline=None)  # tests never assert time: the machine may be busy with others
settings.load_profile("r4090c")

# Programs under test heed signals as in a terminal, also where the tests run under nohup or in the background of a shell.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

pytest_plugins = ["tests.lab.fixtures", "tests.left_out", "tests.vmlab.fixtures"]
