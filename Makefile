# Every target does its own set-up in .venv, from constraints.txt. Needs Python 3.11+, pip, gcc, make and a
# package registry; no GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What is imported is compiled then; compiling all of every package takes as long as installing them.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
LARGE := ^(torch|nvidia-.*|llvmlite)==
TRAINERS := .venv-trainers
LOADERS := .venv-loaders
GUIDES := .venv-guides
DATA ?=
# Hundreds of short processes import the same modules, which are compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test suite quick check docs figures verify trainers guides bench clean
help:
	@echo "make demo     photographs -> pack -> train -> kill -> resume -> table and two pictures (DATA=folder: yours)"
	@echo "make test     ruff, mypy and the test suite: what CI runs"
	@echo "make docs     the site of docs/ in site/: open site/index.html"
	@echo "make quick    a third of it, under another Python: make quick PYTHON=python3.13 VENV=.venv-3.13"
	@echo "make figures  size and shape of the code: lines, files, imports, names that stand for two things (nothing fails by it)"
	@echo "make verify   the long grids, planted bottlenecks, plays of other loaders, memory over 50 epochs (a quiet machine)"
	@echo "make trainers Lightning, Accelerate, Transformers and six more, each running whole jobs (in a venv of its own)"
	@echo "make guides   both columns of the migration guides, with the other loaders (in a venv of its own)"
	@echo "make bench    throughput beside ten other loaders: figures, chart and the README's table (in a venv of its own)"

$(READY): pyproject.toml constraints.txt benchmarks/loaders/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	# Two processes, each with half of the bytes: one downloads while the other one unpacks. Where a pinned
	# version doesn't exist, the last command installs what fits.
	grep -E '$(LARGE)' constraints.txt | $(PIP) --no-deps -r /dev/stdin & \
		grep -vE '$(LARGE)' constraints.txt | $(PIP) --no-deps -r /dev/stdin; wait
	$(PIP) -c constraints.txt -e '.[dali,demo,dev,docs]' -e benchmarks/loaders
	touch $(READY)

setup: $(READY)

demo: $(READY)
	$(BIN)/python -m benchmarks.demo $(if $(DATA),--data '$(DATA)')

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/zensical build --strict --clean
	$(BIN)/python -m benchmarks.reference site

figures: $(READY)
	$(BIN)/python -m benchmarks.figures

test: $(READY)
	# mypy uses one core: meanwhile the other one works for the suite.
	$(MAKE) --no-print-directory -j 2 check suite

suite: $(READY)
	# Compile modules and numba's kernels once, instead of in each worker.
	$(BIN)/python -c 'import penstock.augment.view_kernels, penstock.readers.fieldtypes.mask_kernels, penstock.readers.fieldtypes.mask_warps'
	$(BIN)/pytest -q --collect-only >/dev/null || true
	# Four on two cores: tests wait for processes, servers and disks a third of their time.
	$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=10

# What another Python could break: the pure parts, every container, the loader itself, the install.
quick: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadfile --max-worker-restart=0 tests/pipeline/plan tests/readers tests/augment \
		tests/pipeline/torch_data tests/pipeline/test_loader.py tests/test_layers.py tests/test_install.py

verify: $(READY) trainers guides
	$(BIN)/pytest -q -n 1 --max-worker-restart=0 --hypothesis-profile long -m "not gpu and not trainers"
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.resume

$(TRAINERS)/.ready: pyproject.toml constraints-trainers.txt
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS) || \
		{ $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(TRAINERS); }
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-trainers.txt \
		-e '.[dali,demo,dev,trainers]'
	# The usual torchvision is built for torch's CUDA build; beside a CPU build it breaks whoever imports it.
	$(TRAINERS)/bin/python -c 'import torchvision' 2>/dev/null || \
		$(TRAINERS)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

trainers: $(TRAINERS)/.ready
	$(TRAINERS)/bin/pytest -q -m trainers tests/trainers --durations=5

$(GUIDES)/.ready: pyproject.toml $(wildcard benchmarks/loaders/*.t*)
	test -x $(GUIDES)/bin/python || $(PYTHON) -m venv $(GUIDES) || \
		{ $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(GUIDES); }
	$(GUIDES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c benchmarks/loaders/constraints.txt \
		setuptools wheel -e '.[dali,demo,dev]' -e benchmarks/loaders \
		-r benchmarks/loaders/requirements.txt -r benchmarks/loaders/guides.txt
	# As for `make bench`; without FFCV its guide's first column is skipped.
	$(GUIDES)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c benchmarks/loaders/constraints.txt ffcv || echo "FFCV can't be built here"
	touch $@

# MosaicML Streaming needs numpy below 2.2 and transformers below 5.
$(GUIDES)-mosaicml/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || \
		{ $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(@D); }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		torch==2.13.0 'mosaicml-streaming>=0.13' -e '.[dali,demo,dev]'
	touch $@

guides: $(GUIDES)/.ready $(GUIDES)-mosaicml/.ready
	$(GUIDES)/bin/pytest -q tests/docs/test_guides.py tests/docs/test_converting_guides.py --durations=5
	$(GUIDES)-mosaicml/bin/pytest -q tests/docs/test_converting_guides.py -k mosaicml

$(LOADERS)/.ready: pyproject.toml $(wildcard benchmarks/loaders/*.t*)
	test -x $(LOADERS)/bin/python || $(PYTHON) -m venv $(LOADERS) || \
		{ $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(LOADERS); }
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check -c benchmarks/loaders/constraints.txt \
		setuptools wheel -e '.[dali,demo]' -e benchmarks/loaders -r benchmarks/loaders/requirements.txt
	# FFCV is built from source, against OpenCV and libjpeg-turbo; without them it is left out.
	$(LOADERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c benchmarks/loaders/constraints.txt ffcv || echo "FFCV can't be built here, so it isn't measured: it needs" \
		"Debian's libopencv-dev, libturbojpeg0-dev, pkg-config and g++"
	touch $@

bench: $(LOADERS)/.ready
	$(LOADERS)/bin/python -m benchmarks.compare --short-side-256
	$(LOADERS)/bin/python -m benchmarks.overhead

clean:
	rm -rf $(VENV) $(TRAINERS) $(LOADERS) $(GUIDES) $(GUIDES)-mosaicml demo site .mypy_cache .pytest_cache .ruff_cache .hypothesis
