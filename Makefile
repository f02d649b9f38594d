# make demo    set up everything and train on two nodes on this machine
# make test    set up everything and run the tests, three at a time: most of them wait (ARGS="-n 0" for one after the other)
# make setup   prepare .venv only
# make lint    ruff, mypy, import-linter
# make bench   the benchmarks (needs root; minutes)
# make traintest  the tests that take minutes: every method, every recipe's toy twin on two nodes, exports, all faults, 16 nodes
# make vmtest  the tests before two virtual machines with RDMA and NFS (needs root for the first image; minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A missing .pyc makes each rank's imports three times as slow, and some machines ask Python not to write them.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

.PHONY: demo test test-fast traintest vmtest setup lint bench clean

demo: setup
	@.ci/system-packages sshd:openssh-server ssh:openssh-client
	@$(BIN)/r4090c demo

test: setup
	@.ci/system-packages sshd:openssh-server ssh:openssh-client ip:iproute2 git:git iperf3:iperf3 ping:iputils-ping nft:nftables
	@$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest -m "not slow and not train and not lab" $(ARGS)

traintest: setup
	@.ci/system-packages sshd:openssh-server ssh:openssh-client ip:iproute2 iperf3:iperf3 ping:iputils-ping nft:nftables
	@$(BIN)/python -m pytest -m long -n 2 --dist loadfile $(ARGS)

vmtest: setup
	@.ci/vmtest $(BIN)/python $(ARGS)

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt .ci/venv
	@.ci/venv $(PYTHON) $(VENV)
	@touch $@

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: setup
	@.ci/system-packages sshd:openssh-server ssh:openssh-client ip:iproute2 iperf3:iperf3
	@$(BIN)/python -m bench.startup
	@$(BIN)/python -m bench.affinity
	@$(BIN)/python -m bench.plan
	@$(BIN)/python -m bench.fanout
	@$(BIN)/python -m bench.preflight
	@$(BIN)/python -m bench.launch
	@$(BIN)/python -m bench.data
	@$(BIN)/python -m bench.train
	@$(BIN)/python -m bench.restart
	@$(BIN)/python -m bench.chaos
	@$(BIN)/python -m bench.faults

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
